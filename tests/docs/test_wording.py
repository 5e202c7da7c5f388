"""README, guides, help and messages: short sentences, and no phrase that reads as translated."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from tandem import cli

ROOT = Path(__file__).parents[2]
FACE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
PAGES = [*(ROOT / name for name in FACE), *EXAMPLES, *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src" / "tandem").rglob("*.py"))
MOST_WORDS = 30  # in a sentence; 25 in README
BANNED = {  # what reads as translated, and what to write instead
    r"\bstands? (?:for|by|in|at|still)\b": "represents, waits, is",
    r"\bone's own\b": "your own",
    r"\bgo(?:es|ing)? on\b": "continue, resume",
    r"\bnobody\b": "no one",
    r"\b(?:anew|afresh)\b": "again",
    r"\bwhoever\b": "anyone who",
    r"\bsince \d+(?:\.\d+)? s\b": "for N s",
    r"\bvalid (?:is|are)\b": "expected",
    r"\bfor ever\b": "forever",
    r"(?:^|[.;] )Who [a-z]+s\b": "anyone who",
    r"\bis told (?:by|from|of)\b": "is detected, is notified",
    r"\b(?:colou|neighbou|behaviou|honou)r|\bcentre\b|(?:optim|initial|normal|recogn)is(?:e|ing|ation)\b": (
        "American spelling"
    ),
}
TELLS = {"debug", "info", "warning", "error", "exception", "critical", "print"}


def prose(text: str) -> str:
    """The text of a page without code, comments, addresses of links, and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    text = re.sub(r"`[^`]*`", "CODE", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"^#+ .*$", "", text, flags=re.M)


def sentences(text: str) -> Iterator[str]:
    """Its sentences; a cell of a table is a line of its own."""
    for line in text.splitlines():
        for cell in line.strip("| ").split("|"):
            yield from re.split(r"(?<=[.!?:;])\s+", cell)


def banned(text: str) -> list[str]:
    return [
        f"{found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 40]!r}: write {better}"
        for pattern, better in BANNED.items()
        for found in re.finditer(pattern, text, re.M)
    ]


def messages(source: Path) -> Iterator[str]:
    """What the module logs, prints, or raises as an error of tandem's; a value is %s."""
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name not in TELLS and not name.endswith("Error"):
            continue
        for each in node.args:
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value
            elif isinstance(each, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "%s" for part in each.values]
                yield "".join(parts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_plain_english(page: Path) -> None:
    text, most = prose(page.read_text()), 25 if page.name == "README.md" else MOST_WORDS
    too_long = [each for each in sentences(text) if len(each.split()) > most]
    assert banned(text) + too_long == []


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_help_is_in_plain_english(verb: str) -> None:
    command = [sys.executable, "-m", "tandem", verb, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=patient(60))
    assert banned(" ".join(shown.stdout.split())) == []


def test_the_help_of_make_is_in_plain_english() -> None:
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert banned(shown.stdout) == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_messages_are_in_plain_english(source: Path) -> None:
    found = [each for message in messages(source) for each in banned(message)]
    all_sentences = [each for message in messages(source) for each in sentences(message)]
    too_long = [each for each in all_sentences if len(each.split()) > MOST_WORDS]
    assert found + too_long == []
