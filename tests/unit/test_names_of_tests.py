"""What a folder alone does not show: pytest collects all of them in one process."""

import ast
import importlib
from collections import Counter
from contextlib import suppress
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


def imported(path: Path) -> set[str]:
    """The top-level modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found


def test_no_module_of_tests_imports_a_benchmark() -> None:
    """What both need is in tests/trials; a benchmark is tested as a program."""
    programs = {path.stem for path in (TESTS.parent / "benchmarks").glob("*.py")} | {"benchmarks"}
    found = {str(path.relative_to(TESTS)): imported(path) & programs for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}


WAITING = {"run", "check_output", "wait", "communicate", "join", "urlopen", "create_connection"}
WAITING |= {"HTTPConnection", "HTTPSConnection"}


def impatient(path: Path) -> list[int]:
    """The lines with calls that wait for a number of seconds that TEST_PATIENCE does not change."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in WAITING:
            limits = [given.value for given in node.keywords if given.arg == "timeout"]
            limits = [each.value for each in limits if isinstance(each, ast.Constant)]
            found += [node.lineno for limit in limits if limit is not None and float(str(limit)) >= 5]
    return found


def test_limits_are_longer_on_a_slow_machine() -> None:
    """Shorter ones belong to polls, which ask again."""
    modules = [path for path in TESTS.rglob("*.py") if not {"programs", "fixtures"} & {*path.parts}]
    found = {str(path.relative_to(TESTS)): impatient(path) for path in modules}
    assert {path: lines for path, lines in found.items() if lines} == {}


def absent(path: Path) -> list[str]:
    """The names that a file takes from a module of tandem, as `module.name`, and that it does not have."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tandem":
            for each in node.names:
                with suppress(ImportError):  # most are functions and classes
                    modules[each.asname or each.name] = importlib.import_module(f"{node.module}.{each.name}")
    return [
        f"{node.value.id}.{node.attr}, line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if node.value.id in modules and not hasattr(modules[node.value.id], node.attr)
    ]


def test_what_tests_replace_in_a_module_is_there() -> None:
    """Types of tests are not checked, and some run only in the gate: a renamed function was found late."""
    found = {str(path.relative_to(TESTS)): absent(path) for path in TESTS.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
