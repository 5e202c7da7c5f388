"""benchmarks/data_path.py and time_to_98.py with few pictures: every row is there, of both sides."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.data.datasets import NAMES, write_idx
from tandem.data.digits import draw

PROGRAMS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def few(tmp_path: Path, require: Callable[..., None]) -> Path:
    """A folder with 480 + 40 digits, as if all had been drawn."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError) as error:
        require("torchvision", False, str(error))
    (tmp_path / "digits").mkdir()
    for seed, size, names in ((0, 480, NAMES[:2]), (1, 40, NAMES[2:])):
        for name, tensor in zip(names, draw(size, seed), strict=True):
            write_idx(tmp_path / "digits" / name, tensor)
    return tmp_path


def measured(processes: Any, program: str, few: Path, *flags: object, limit: float) -> list[dict[str, Any]]:
    """The rows of a benchmark on these few pictures; whether they meet a target says nothing."""
    found = few / "found.json"
    command = [sys.executable, PROGRAMS / program, "--data-dir", few, "--json", found, *flags]
    code, said = processes.run([str(word) for word in command], limit=limit, cwd=few)
    assert code in (0, 1) and found.exists(), said
    return list(json.loads(found.read_text())["rows"])


def per_second(side: str) -> float:
    """From "NAME 1,234/s (1,200 to 1,300)"."""
    return float(re.findall(r"([\d,]+)/s \(", side)[0].replace(",", ""))


@pytest.mark.timeout(300)
def test_every_pair_has_a_row(few: Path, processes: Any) -> None:
    rows = measured(processes, "data_path.py", few, "--rounds", 1, "--seconds", 0.01, limit=280)
    assert len(rows) == 8 and all(" times" in row["ratio"] for row in rows)
    own = [row for row in rows if row["name"].startswith("own data")]
    for row in own:
        ratio = float(row["ratio"].partition(" ")[0].replace(",", ""))
        whole = 0.5 if ratio >= 20 else 0.01  # a large one is shown without decimals
        assert ratio == pytest.approx(per_second(row["outcome"]) / per_second(row["control"]), abs=whole)
        assert row["target"] == "at least 0.95 times" and isinstance(row["passed"], bool)
    assert len(own) == 2


@pytest.mark.soak
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_recipes_and_tandem_come_to_an_accuracy(few: Path, processes: Any) -> None:
    flags = ("--accuracy", 0.01, "--samples", 480)
    rows = measured(processes, "time_to_98.py", few, *flags, limit=360)
    assert len(rows) == 8
    assert not any("not reached" in row["outcome"] + row["control"] for row in rows)
    assert all(row["seconds"] > 0 for row in rows if row["name"].endswith("CPU time"))


@pytest.mark.multi
def test_who_is_not_there_in_time_has_the_limit(few: Path, processes: Any) -> None:
    flags = ("--accuracy", 2, "--samples", 480, "--only", "tutorial", "--limit", 1)
    rows = measured(processes, "time_to_98.py", few, *flags, limit=90)
    by_the_clock = [row for row in rows if not row["name"].endswith("CPU time")]
    assert len(by_the_clock) == 2 and all(row["ratio"].startswith("at least ") for row in by_the_clock)
    for row in by_the_clock:
        assert row["seconds"] == row["control_seconds"] == 1
        assert "not reached: not tested yet" in row["outcome"] and "not reached" in row["control"]


@pytest.mark.multi
def test_who_ends_without_the_accuracy_is_an_error(few: Path, processes: Any) -> None:
    flags = ["--accuracy", "2", "--samples", "480", "--only", "tutorial", "--data-dir", str(few)]
    code, said = processes.run([sys.executable, str(PROGRAMS / "time_to_98.py"), *flags], cwd=few)
    assert code == 1 and "ended without 200%" in said
