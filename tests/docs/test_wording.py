"""README, guides, help, messages, docstrings and comments: no phrase that reads as translated."""

import ast
import inspect
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
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
PLAIN = (  # directories whose docstrings and comments are held to DIALECT, the others to FOREIGN
    "checkpoint",
    "cluster",
    "config",
    "data",
    "distributed",
    "kubernetes",
    "report",
    "shipped",
    "tasks",
    "telemetry",
    "verify",
)
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
    # A text is one line here; a summary is a sentence, or a noun phrase, but no loose clause.
    r"\A(?:At|By|From|Nor|Of|That|Those|To|Who)\b": "an imperative, or a noun phrase",
}
DIALECT = {  # more, for PLAIN
    r"\b(?:some|no|every)body\b": "a process, another launch, no one",
    r"\bha(?:s|ve) to\b": "must",
    r"\bof (?:its|their|his) own(?=$|[.,;:)]| (?:and|that|which|in|for)\b)": "its own X, a separate X",
    r"\bthat very\b|\bthis very\b": "exactly this",
    r"\bone behind the other\b": "one after another",
    r"\bas (?:it|they) (?:lie|stand)s?\b|\blies? (?:in|on|at|there|here|beside)\b": "is in, is stored in",
    r"\b(?:is|are|was|were) (?:told|said)\b": "gets, receives, is reported",
    r"\bgives? out\b|\bhands? (?:on|in|out)\b": "returns, passes",
    r"\bbeside\b": "next to, in addition to",
    r"\b(?:is|are|was|were) whole\b": "complete, valid",
    r"\bwhere (?:it|that) can(?:not)? be\b": "if it can",
    r"\bpictures?\b": "image",
    r"\bmends?\b": "fix, repair",
    r"\bwithout a word\b": "silently",
}
OF_A_FUNCTION = re.compile(r"(?:Whether|What|Who|Where|Which|To be|Is|Are|Those|These|It|They|Its)\b")
"""How the docstring of a function does not begin; `Return ...`, `Raise ...` or another verb does."""
DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|fmt:|pragma|mypy:|ruff:)")
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


def banned(text: str, patterns: dict[str, str] = BANNED) -> list[str]:
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


def docstrings(source: Path) -> Iterator[tuple[bool, str]]:
    """(is it the docstring of a function?, its text) of all, also those below a constant or attribute.

    Indented examples are left out.
    """
    for node in ast.walk(ast.parse(source.read_text())):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            continue
        decorators = map(ast.dump, node.decorator_list) if isinstance(node, ast.FunctionDef) else ()
        is_call = isinstance(node, ast.FunctionDef) and node.name[0:2] != "__"
        is_call = is_call and not any("property" in each for each in decorators)
        for position, each in enumerate(node.body):
            value = each.value if isinstance(each, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines = inspect.cleandoc(value.value).splitlines()
                text = "\n".join(line for line in lines if not line.startswith("    "))
                yield is_call and position == 0, re.sub(r"`[^`]*`", "CODE", text)


def comments(source: Path) -> Iterator[str]:
    """Each comment, and lines of comments that follow each other as one."""
    block, last = list[str](), -1
    with tokenize.open(source) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type != tokenize.COMMENT or DIRECTIVE.match(token.string):
                continue
            if token.start[0] != last + 1 and block:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start[0]
    if block:
        yield " ".join(block)


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


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source.relative_to(ROOT / "src")))
def test_docstrings_and_comments_are_in_plain_english(source: Path) -> None:
    texts = [*docstrings(source), *((False, comment) for comment in comments(source))]
    is_plain = source.relative_to(PACKAGE).parts[0] in PLAIN
    patterns = BANNED | (DIALECT if is_plain else FOREIGN)
    found = [each for _, text in texts for each in banned(text, patterns)]
    if is_plain:
        without_verb = [text for is_call, text in texts if is_call and OF_A_FUNCTION.match(text)]
        found += [f"begin with a verb: {text[:60]!r}" for text in without_verb]
        paragraphs = [" ".join(part.split("\n")) for _, text in texts for part in text.split("\n\n")]
        found += [each for part in paragraphs for each in sentences(part) if len(each.split()) > MOST_WORDS]
    assert found == []
