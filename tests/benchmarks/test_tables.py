"""Every measured figure of README and docs is what benchmarks/page.py makes of benchmarks/results."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import page
from small_task import Small
from table import Row, machine, render, write
from tandem.tasks.classification import strided_cnn

NAMES = [path.name for path in page.PAGES]
FILES = sorted(path for path in page.RESULTS.glob("*.json") if path.name != "recorded.json")
MEASURED = re.compile(
    r"\bmedian (?:of )?\d|\d (?:µs|us)\b|\b\d+\.\d+ ms\b|\btimes (?:faster|as fast|shorter)"
    r"|goodput (?:\w+ )?\d|\b\d+ of \d+ (?:kills|pairs|starts|trials)"
)


def outside(text: str) -> str:
    """What no result makes: a page without code blocks and generated figures."""
    return page.MARK.sub("", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def test_the_page_is_made_of_the_results() -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(page.RESULTS)


@pytest.mark.parametrize("path", page.PAGES, ids=NAMES)
def test_figures_are_those_of_the_results(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == page.fill(text), "a figure differs from the results: run python benchmarks/page.py"


@pytest.mark.parametrize("path", page.PAGES, ids=NAMES)
def test_no_figure_is_typed_by_hand(path: Path) -> None:
    assert MEASURED.findall(outside(path.read_text(encoding="utf-8"))) == []


def test_another_result_makes_another_page(tmp_path: Path) -> None:
    shutil.copytree(page.RESULTS, tmp_path, dirs_exist_ok=True)
    changed = tmp_path / "reliability_recovery.json"
    changed.write_text(changed.read_text().replace('"seconds": 0.22', '"seconds": 7.77'))
    text = (page.ROOT / "README.md").read_text(encoding="utf-8")
    assert "median 7.77 s; torchrun 6.81 s" in page.fill(text, tmp_path)


def test_each_figure_is_shown_in_one_place() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in page.PAGES)
    shown = [name for _, name, *_ in page.MARK.findall(text)]
    assert len(shown) == len(set(shown))
    recorded = json.loads((page.RESULTS / "recorded.json").read_text())
    elsewhere = [question.file.removesuffix(".json") for question in page.QUESTIONS if question.place]
    tables = [name for name in elsewhere if (page.RESULTS / f"{name}.json").exists()]
    made = {name.replace("-", "_") for name in page.FIGURES} | {"dp_vs_ddp"}
    missing = [name for name in tables if name not in shown and name not in made]
    assert missing == [] and set(recorded) <= set(shown)
    with pytest.raises(KeyError):
        page.figure("no-such-figure")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_result_says_what_it_was_measured_on(path: Path) -> None:
    """A value that an old file does not have is null, with the commit that added the file."""
    found = json.loads(path.read_text())
    for about in found.get("machines", {"": found.get("machine")}).values():
        assert about is not None and about["cores"] and about["time"]
        assert set(machine()) <= set(about)
        unknown = [name for name in ("commit", "load_before", "processor") if about[name] is None]
        assert not unknown or about["added_in"], unknown
    rows = [row for row in found.get("rows", []) if "outcome" in row]
    assert all({"trials", "control_trials", "seconds", "control_seconds"} <= set(row) for row in rows)


def test_a_written_result_records_both_sides_and_the_machine(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    write([Row("a step", 5, "1 ms", "bare 2 ms", "0.5", control_trials=3, seconds=1e-3)], path)
    found: dict[str, Any] = json.loads(path.read_text())
    assert found["machine"]["load_before"] is not None and found["machine"]["processor"]
    assert (found["rows"][0]["control_trials"], found["rows"][0]["seconds"]) == (3, 1e-3)
    shown = page.page(tmp_path)
    assert "before the start)" in shown and "| a step | 5 | 1 ms | bare 2 ms | 3 | 0.5 | yes |" in shown


def test_a_column_that_no_row_fills_is_left_out() -> None:
    assert render([Row("a", 1, "fine")]).splitlines()[0] == "| what | trials | outcome | met |"


def test_models_have_the_parameters_that_the_pages_name() -> None:
    nets = (strided_cnn(), Small().build_model())
    cnn, small = (sum(each.numel() for each in net.parameters()) for net in nets)
    assert f"{cnn:,} parameters" in page.CNN and f"{small:,} parameters" in page.SMALL


def test_the_picture_of_a_recovery_shows_what_its_text_says() -> None:
    readme = (page.ROOT / "README.md").read_text(encoding="utf-8")
    seconds = re.findall(r"!\[[^\]]*?([\d.]+ s) later[^\]]*\]\(docs/pictures/recovery.svg\)", readme)
    picture = (page.ROOT / "docs" / "pictures" / "recovery.svg").read_text(encoding="utf-8")
    assert len(seconds) == 1 and f"training again after {seconds[0]}" in picture


def test_what_no_file_has_is_not_measured(tmp_path: Path) -> None:
    text = page.page(tmp_path)
    assert text.count("Not measured.") == sum(not question.place for question in page.QUESTIONS)
    programs = {question.program.split()[0] for question in page.QUESTIONS}
    assert all((page.ROOT / "benchmarks" / program).exists() for program in programs)
