"""Programs that tests run as a user's own: files under tests/programs, where ruff reads them."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


def program_text(name: str) -> str:
    """The text of tests/programs/NAME.py."""
    return (PROGRAMS / f"{name}.py").read_text()
