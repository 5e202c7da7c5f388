"""The documentation against the code: generated tables, links, and the flags of README's commands."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tandem import config
from tandem.cli import VERBS, parser_of
from tandem.telemetry import metrics

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for folder in (".", "docs", "examples/tutorials") for page in (ROOT / folder).glob("*.md")
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def table_of(page: str) -> str:
    """The last table of a page."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return "\n".join(line for line in text.splitlines() if line.startswith("|"))


def commands(text: str) -> list[list[str]]:
    """The words of every `tandem VERB ...` in code blocks and code spans."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    verbs = "|".join(VERBS)
    found = []
    for line in [line for block in blocks for line in block.splitlines()] + spans:
        match = re.search(rf"\btandem ((?:{verbs}|--)\b.*|--\S+)", line)
        if match and " | " not in line:
            found.append(shlex.split(match[1], comments=True))
    return found


def test_configuration_is_generated() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page.endswith("\n" + config.markdown())


def test_metrics_are_generated() -> None:
    assert table_of("metrics.md") == metrics.markdown_table().strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_exist(page: Path) -> None:
    for link in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = page.parent / (file or page.name)
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def anchors(page: Path) -> list[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        "examples/tutorials/README.md",
        "docs/tutorial-task.md",
        "docs/tutorial-slurm.md",
        "docs/debug-a-rank.md",
    ],
)
def test_readme_names_known_flags_only(page: str) -> None:
    found = commands((ROOT / page).read_text(encoding="utf-8").replace("\\\n", ""))
    assert len(found) >= 6, found
    for words in found:
        flags = [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
        helped = parser_of(words[0]).format_help() if words[0] in VERBS else ""
        known = {*re.findall(r"--[\w.-]+", helped), "--help", "--version"}
        known |= {flag.replace("--", "--no-", 1) for flag in known}
        assert not [flag for flag in flags if flag not in known and not flag.startswith("--task.")], words


def test_the_table_of_packages_has_all_layers_in_their_order() -> None:
    """The rows go up, as in import-linter's contract; a new module or package needs a place in both."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["id"] == "layers")
    height = {name: -i for i, layer in enumerate(layers) for name in re.findall(r"\w+", layer)}
    table = (ROOT / "docs" / "architecture.md").read_text().partition("| package |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)(?:\.py|/)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    assert {name for row in rows for name in row} == height.keys() - {"__main__"}
    heights = [[height[name] for name in row] for row in rows]
    falls = [row for row, low, up in zip(rows[1:], heights, heights[1:], strict=False) if max(low) > min(up)]
    assert falls == [], "these rows belong further down or up"


def test_readme_verbs_exist() -> None:
    for words in commands((ROOT / "README.md").read_text(encoding="utf-8")):
        assert words[0] in VERBS or words[0].startswith("--")


def test_what_is_said_of_others_links_to_where_it_is_from() -> None:
    """Each cell of compared.md about another project, but one that says `as torch`; each link is defined."""
    text = (ROOT / "docs" / "compared.md").read_text(encoding="utf-8")
    written = re.sub(r"<!-- figure: .*?<!-- end -->", "", text, flags=re.DOTALL)  # the others are measured
    cells = []
    for table in re.findall(r"(?:^\|.*\n)+", written, re.M):
        head, _, *rows = (re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines())
        cells += [(row[0], cell) for row in rows for cell in row[2 if "tandem" in head[1] else 1 :]]
    assert len(cells) >= 53
    assert [each for each in cells if each[1] != "as torch" and not re.search(r"\]\[[\w-]+\]", each[1])] == []
    sources = dict(re.findall(r"^\[([\w-]+)\]: (https://\S+)$", text, re.M))
    assert set(re.findall(r"\]\[([\w-]+)\]", text)) == set(sources)
    better = [line for line in text.partition("## Where they are better")[2].splitlines() if line[:2] == "- "]
    assert [line for line in better[:-1] if "][" not in line] == []


def test_extras_are_this_projects_own() -> None:
    """`tandem` on PyPI is another project: who types that name installs a stranger's package."""
    about = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    texts = [*(ROOT / "src").rglob("*.py"), *PAGES]
    asked = {
        match
        for text in texts
        for match in re.findall(r"'([\w-]+)\[(\w+)\]'", text.read_text(encoding="utf-8"))
    }
    assert {extra for _, extra in asked} <= set(about["optional-dependencies"]), asked
    assert {name for name, _ in asked} == {about["name"]}
