"""pytest takes two modules of one name for one, and ends where it collects both."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_modules_of_tests_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("*.py") if "fixtures" not in path.parts)
    assert [name for name, count in names.items() if count > 1 and name.startswith("test_")] == []
