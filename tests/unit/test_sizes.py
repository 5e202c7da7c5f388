"""A room that one can take in: no module beyond 500 lines, no function of the loop beyond a screen."""

import ast
from collections import Counter
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "tandem"
MOST_LINES, A_SCREEN = 500, 60


def test_no_module_has_outgrown_a_room() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SRC.rglob("*.py")}
    assert len(sizes) > 200
    assert [str(path.relative_to(SRC)) for path, lines in sizes.items() if lines > MOST_LINES] == []


def test_the_loop_is_on_one_screen() -> None:
    tree = ast.parse((SRC / "training" / "loop.py").read_text(encoding="utf-8"))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    lengths = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {"train", "after_step"} <= lengths.keys()
    assert {name: length for name, length in lengths.items() if length > A_SCREEN} == {}


def test_a_class_name_means_one_thing() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")]
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []


def test_functions_are_short() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    functions = [node for tree in trees for node in ast.walk(tree) if isinstance(node, kinds)]
    lengths = sorted((node.end_lineno or 0) - node.lineno + 1 for node in functions)
    assert lengths[int(len(lengths) * 0.9)] <= 20 and lengths[-1] <= 75
