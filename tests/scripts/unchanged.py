"""Where the programs lie that know nothing of tandem."""

from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
