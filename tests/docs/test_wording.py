"""README, guides, help, messages, docstrings and comments: no phrase that reads as translated.

Pages and messages also have short sentences.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from patience import patient
from tandem import cli

ROOT = Path(__file__).parents[2]
FACE = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
EXAMPLES = sorted((ROOT / "examples").rglob("README.md"))
PAGES = [*(ROOT / name for name in FACE), *EXAMPLES, *sorted((ROOT / "docs").glob("*.md"))]
PACKAGE = ROOT / "src" / "tandem"
SOURCES = sorted(PACKAGE.rglob("*.py"))
WRITTEN = (  # whose docstrings and comments are held to BANNED and FOREIGN, too
    "*.py",
    "launch/*.py",
    "own_loop/*.py",
    "platforms/*.py",
    "script/*.py",
    "training/*.py",
    "verbs/*.py",
)
DOCUMENTED = sorted(source for pattern in WRITTEN for source in PACKAGE.glob(pattern))
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
FOREIGN = {  # more of the kind, which only docstrings and comments had
    r"\b(?:some|any|no)body\b": "anyone, no process, or the passive",
    r"\bmends?\b": "fix, repair",
    r"\bbeside\b": "next to, in addition to",
    r"\bgo(?:es|ing)? round\b|\bgone on\b": "rejoin, continued",
    r"\bhand(?:s|ed)? on\b": "forward, pass",
    r"\bsigns? of life\b": "heartbeat",
    # Each text is one line; a summary is a sentence, or a noun phrase, but no loose clause.
    r"^(?:As|At|By|From|Nor|Of|On|That|Those|To|Where|Who|With)\b": "an imperative, or a noun phrase",
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


def banned(text: str, patterns: Mapping[str, str] = BANNED) -> list[str]:
    return [
        f"{found[0]!r} in {text[max(0, found.start() - 40) : found.end() + 40]!r}: write {better}"
        for pattern, better in patterns.items()
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


def documentation(source: Path) -> Iterator[str]:
    """The module's docstrings, those of its classes, functions and constants, and its comments."""
    text = source.read_text()
    for node in ast.walk(ast.parse(text)):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.value
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


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


@pytest.mark.parametrize("source", DOCUMENTED, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_docstrings_and_comments_are_in_plain_english(source: Path) -> None:
    texts = [re.sub(r"`[^`]*`", "CODE", " ".join(text.split())) for text in documentation(source)]
    assert [each for text in texts for each in banned(text, {**BANNED, **FOREIGN})] == []
