"""What pages and the package name in backquotes exists: files, modules, classes, functions."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = sorted((ROOT / "docs").glob("*.md"))
FOR_MAINTAINERS = ("architecture.md", "benchmarks.md", "cluster-on-a-laptop.md", "platforms.md")
FOLDERS = "src tests docs benchmarks examples k8s compose slurm docker monitoring .ci .github".split()
ELSEWHERE = {"env_file"}  # a key of Compose files
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
A_FILE = re.compile(r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml|mk|ya?ml)")
A_CLASS = re.compile(r"_?[A-Z][a-z0-9]+(?:[A-Z]+[a-z0-9]+)+")
A_FUNCTION = re.compile(r"(_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+)(?:\(\))?")
A_MEMBER = re.compile(r"([A-Za-z_]\w*)\.(?!(?:py|md|toml|mk|ya?ml)$)(\w+)(?:\(\))?")


@cache
def files() -> str:
    """Every file of the repository, one a line, from a slash on."""
    found = [*ROOT.iterdir(), *(path for name in FOLDERS for path in (ROOT / name).rglob("*"))]
    return "\n".join(f"/{path.relative_to(ROOT)}" for path in found) + "\n"


@cache
def names() -> frozenset[str]:
    """Every identifier and every whole string of the package and of the tests."""
    found = {path.stem for path in SOURCES}
    for path in {*SOURCES, *(ROOT / "tests").rglob("*.py")} - {Path(__file__)}:
        for node in ast.walk(ast.parse(path.read_text())):
            found |= {value for _, value in ast.iter_fields(node) if isinstance(value, str)}
    return frozenset(found)


def is_missing(span: str) -> bool:
    if A_FILE.fullmatch(span):
        return f"/{span}\n" not in files()
    if span.startswith("tandem.") and re.fullmatch(r"[\w.]+", span):
        return not all(part in names() for part in span.split(".")[1:] if part)
    if member := A_MEMBER.fullmatch(span):
        is_ours = member[1] in {path.stem for path in SOURCES} or A_CLASS.fullmatch(member[1])
        return bool(is_ours) and member[2] not in names()
    named = A_FUNCTION.fullmatch(span)
    if named:
        return named[1].removeprefix("tandem_") not in names() | ELSEWHERE
    return A_CLASS.fullmatch(span) is not None and span not in names()


@pytest.mark.parametrize("path", [ROOT / "CONTRIBUTING.md", *PAGES], ids=lambda path: path.name)
def test_a_page_names_what_exists(path: Path) -> None:
    """On pages for users only paths of Python files, because other names may belong to other programs."""
    is_whole = path.name in ("CONTRIBUTING.md", *FOR_MAINTAINERS)
    prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
    spans = [span for span in SPAN.findall(prose) if is_whole or re.fullmatch(r"[\w./-]+/[\w-]+\.py", span)]
    assert not [span for span in spans if is_missing(span)]


def test_docstrings_and_comments_name_what_exists() -> None:
    found = {path: [each for each in SPAN.findall(path.read_text()) if is_missing(each)] for path in SOURCES}
    assert not {str(path.relative_to(ROOT)): spans for path, spans in found.items() if spans}


def test_a_stale_name_is_found() -> None:
    assert all(map(is_missing, ("training/stale.py", "StaleClass", "signals.stale_name", "stale_name()")))
    existing = ("training/loop.py", "tandem.launch.agent", "RunDir", "RunDir.open", "close()")
    assert not any(map(is_missing, existing))
