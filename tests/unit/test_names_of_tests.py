"""What a folder alone does not show: pytest collects all of them in one process."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_module_imports_from_a_conftest() -> None:
    """There are several, and the one that was found first is the one."""
    found = [path.name for path in TESTS.rglob("test_*.py") if "\nfrom conftest import" in path.read_text()]
    assert found == []


def test_no_two_modules_of_tests_have_one_name() -> None:
    """pytest takes two modules of one name for one, and ends where it collects both."""
    names = Counter(path.name for path in TESTS.rglob("*.py") if "fixtures" not in path.parts)
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []
