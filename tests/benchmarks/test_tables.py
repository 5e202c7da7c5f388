"""Every measured figure of README and docs is what benchmarks/page.py makes of benchmarks/results."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tandem import __version__
from tandem.tasks.base import load_task
from tandem.tasks.classification import strided_cnn

ROOT = Path(__file__).parents[2]
PROGRAMS, RESULTS = ROOT / "benchmarks", ROOT / "benchmarks" / "results"
PAGE = "docs/benchmarks.md"
PAGES = (ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path != ROOT / PAGE))
FILES = sorted(path for path in RESULTS.glob("*.json") if path.name != "recorded.json")
MARKED = re.compile(r"<!-- figure: [\w-]+ -->.*?<!-- end -->", re.DOTALL)
MEASURED = re.compile(
    r"\bmedian (?:of )?\d|\d (?:µs|us)\b|\b\d+\.\d+ ms\b|\btimes (?:faster|as fast|shorter)"
    r"|goodput (?:\w+ )?\d|\b\d+ of \d+ (?:kills|pairs|starts|trials)"
)


def ran(program: str, *words: str, codes: tuple[int, ...] = (0,)) -> str:
    command = [sys.executable, str(PROGRAMS / program), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100), cwd=ROOT)
    assert done.returncode in codes, done.stderr
    return done.stdout


def printed(results: Path, page: str = PAGE) -> str:
    """A page as these results make it."""
    return ran("page.py", "--results", str(results), "--print", page)


def measure_again(path: Path) -> None:
    """Give the first row of a result a median that nothing has."""
    found = json.loads(path.read_text())
    found["rows"][0]["seconds"] = 7.77
    path.write_text(json.dumps(found))


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """What one benchmark writes as JSON, and the table that it prints."""
    path = tmp_path_factory.mktemp("written") / "order.json"
    flags = ("--only", "order", "--samples", "100000", "--json", str(path))
    table = ran("thousand_ranks.py", *flags, codes=(0, 1))  # 1: too slow on a busy machine
    return json.loads(path.read_text()), table


def outside(text: str) -> str:
    """What no result makes: a page without code blocks and generated figures."""
    return MARKED.sub("", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))


def test_figures_are_those_of_the_results_and_each_is_on_one_page() -> None:
    ran("page.py", "--check")  # where it ends with 1: run python benchmarks/page.py


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_is_typed_by_hand(path: Path) -> None:
    assert MEASURED.findall(outside(path.read_text(encoding="utf-8"))) == []


def test_another_result_makes_another_page(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    measure_again(tmp_path / "reliability_recovery.json")
    assert "median 7.77 s; torchrun" in printed(tmp_path, "README.md")


def test_a_page_that_differs_and_a_figure_without_a_page_fail_the_check(tmp_path: Path) -> None:
    for part in ("README.md", "docs", "benchmarks"):
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        copy(ROOT / part, tmp_path / part)
    command = [sys.executable, str(tmp_path / "benchmarks" / "page.py"), "--check"]
    measure_again(tmp_path / "benchmarks" / "results" / "reliability_recovery.json")
    recorded = tmp_path / "benchmarks" / "results" / "recorded.json"
    entries = json.loads(recorded.read_text())
    recorded.write_text(json.dumps({**entries, "shown-nowhere": next(iter(entries.values()))}))
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 1 and "README.md" in done.stderr and "shown-nowhere" in done.stderr
    assert (tmp_path / "README.md").read_text() == (ROOT / "README.md").read_text(), "nothing is written"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_result_says_what_it_was_measured_on(path: Path, written: tuple[dict[str, Any], str]) -> None:
    """A value that an old file does not have is null, with the commit that added the file."""
    found = json.loads(path.read_text())
    for about in found.get("machines", {"": found.get("machine")}).values():
        assert about is not None and about["cores"] and about["time"]
        assert set(written[0]["machine"]) - {"tandem"} <= set(about)  # files of 0.1.0 may lack the version
        unknown = [name for name in ("commit", "load_before", "processor") if about[name] is None]
        assert not unknown or about["added_in"], unknown
        assert not str(about["commit"]).endswith("-dirty")
    rows = [row for row in found.get("rows", []) if "outcome" in row]
    assert all({"trials", "control_trials", "seconds", "control_seconds"} <= set(row) for row in rows)


def test_a_written_result_records_both_sides_and_the_machine(
    written: tuple[dict[str, Any], str], tmp_path: Path
) -> None:
    found, _ = written
    assert found["machine"]["load_before"] is not None and found["machine"]["processor"]
    row = {"name": "a step", "trials": 5, "outcome": "1 ms", "control": "bare 2 ms", "ratio": "0.5"}
    row |= {"target": "", "passed": True, "control_trials": 3, "seconds": 1e-3}
    assert set(row) < set(found["rows"][0])
    (tmp_path / "gpu.json").write_text(json.dumps({**found, "rows": [row]}))
    shown = printed(tmp_path)
    assert "before the start)" in shown and "| a step | 5 | 1 ms | bare 2 ms | 3 | 0.5 | yes |" in shown


def test_a_column_that_no_row_fills_is_left_out(written: tuple[dict[str, Any], str]) -> None:
    assert written[1].splitlines()[0] == "| what | trials | outcome | ratio | target | met |"


def test_models_have_the_parameters_that_the_pages_name() -> None:
    small = load_task(f"{PROGRAMS / 'small_task.py'}:Small", {}, ROOT, False)
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    for name, net in (("CNN", strided_cnn()), ("model", small.build_model())):
        assert f"a {name} of {sum(each.numel() for each in net.parameters()):,} parameters" in text


def test_the_picture_of_a_recovery_shows_what_its_text_says() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    seconds = re.findall(r"!\[[^\]]*?([\d.]+ s) later[^\]]*\]\(docs/pictures/recovery.svg\)", readme)
    picture = (ROOT / "docs" / "pictures" / "recovery.svg").read_text(encoding="utf-8")
    assert len(seconds) == 1 and f"training again after {seconds[0]}" in picture


def test_what_no_file_has_is_not_measured(tmp_path: Path) -> None:
    text = printed(tmp_path)
    unmeasured = re.findall(r"^`python benchmarks/(\S+\.py).*Not measured", text, re.M)
    assert len(unmeasured) == text.count("Not measured.") == text.count("\n## ") - 2, "all but the last two"
    elsewhere = re.findall(r"^\| \[.*\) \| `(\S+\.py)", text, re.M)
    assert elsewhere and all((PROGRAMS / program).exists() for program in (*unmeasured, *elsewhere))


def test_a_result_is_refused_for_files_that_differ_from_the_commit(tmp_path: Path) -> None:
    """Before anything is measured. What benchmarks generate does not count."""
    checkout = tmp_path / "checkout"
    shutil.copytree(PROGRAMS, checkout / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "docs").mkdir()
    (checkout / "docs" / "page.md").write_text("old")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(checkout)]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], check=True)

    def refusal(*words: str) -> str:
        command = [sys.executable, str(checkout / "benchmarks" / "table.py"), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
        assert done.returncode == (2 if done.stderr else 0) and len(done.stderr.splitlines()) <= 1
        return done.stderr

    def refused_import(path: Path) -> int:
        code = f"import sys; sys.argv += [{str(path)!r}]; import table"
        return subprocess.run([sys.executable, "-c", code], cwd=checkout / "benchmarks").returncode

    (checkout / "docs" / "page.md").write_text("new")
    (checkout / "benchmarks" / "results" / "gpu.json").write_text("{}")
    assert refusal() == ""
    (checkout / "benchmarks" / "marked.py").write_text("")
    assert "benchmarks/marked.py differs" in refusal() and "--json /" in refusal()
    assert refused_import(checkout / "benchmarks" / "results" / "gpu.json") == 2
    assert refused_import(tmp_path / "gpu.json") == 0
    subprocess.run([*git, "checkout", "-q", "benchmarks/marked.py"], check=True)
    (checkout / "notes.txt").write_text("")
    assert refusal() == ""
    (checkout / "benchmarks" / "new.py").write_text("")
    assert "benchmarks/new.py differs" in refusal()


def test_a_program_that_writes_results_by_default_is_refused_before_it_measures(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    shutil.copytree(PROGRAMS, checkout / "benchmarks", ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "init", "-q", str(checkout)], check=True)  # with nothing committed, all is new
    for program, *words in (("dp_vs_ddp.py",), ("data_path.py", "--json=benchmarks/results/data_path.json")):
        command = [sys.executable, str(checkout / "benchmarks" / program), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), cwd=checkout)
        assert done.returncode == 2 and "differs from the commit" in done.stderr.splitlines()[-1]


def test_a_result_of_an_earlier_release_is_marked(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "reliability_recovery.json"
    found = json.loads(path.read_text())
    about = {"commit": "abc1234", "command": "x", "load_before": 0.1, "tandem": "0.0.9"}
    found["machine"] |= about
    found["machine"].pop("added_in", None)
    path.write_text(json.dumps(found))
    assert "**Older result**, of tandem 0.0.9." in printed(tmp_path, "docs/reliability.md")
    assert "| older, abc1234 |" in printed(tmp_path, "README.md")
    path.write_text(json.dumps({**found, "machine": found["machine"] | {"tandem": __version__}}))
    assert "| abc1234 |" in printed(tmp_path, "README.md")
