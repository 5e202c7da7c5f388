"""benchmarks/data_path.py and time_to_98.py with few pictures: every row is there, of both sides."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import data_path
from data_path import PAIRS, Pace, Pair, measure
from patience import patient
from tandem.data.digits import draw
from tandem.data.idx import NAMES, write_idx
from time_to_98 import time_to

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


def test_every_pair_has_a_row(few: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LEAST_BATCHES": 2, "PHOTOGRAPHS": 4, "OF_EACH": 4}.items():
        monkeypatch.setattr(data_path, name, value)
    rows = measure(few, rounds=1, seconds=0.01)
    assert [row.name for row in rows] == [pair.name for pair in PAIRS]
    assert all(" times" in row.ratio for row in rows)


def test_what_a_sample_costs_more_is_in_microseconds() -> None:
    pair = Pair("own", "mine", "theirs", most_more=8)
    slower, faster = (50_000, "0.50 times, +10.0 us a sample", False), (125_000, "1.25 times", True)
    for pace, told, is_met in (slower, faster):
        row = data_path._row(pair, [Pace(pace, pace)], [Pace(100_000, 100_000)])
        assert row.ratio.startswith(told) and row.passed is is_met
        assert row.target == "at most 8 us a sample more"


def test_both_sides_read_the_same_pictures(few: Path) -> None:
    readers = data_path.readers(few)
    for mine, control in (("digits", "torchvision's MNIST, no workers"), ("folder 0", "folder 2")):
        (inputs, labels), (others, _) = next(readers[mine]()), next(readers[control]())
        assert (inputs.shape, inputs.dtype) == (others.shape, others.dtype)
        assert len(labels) == len(inputs)


def test_who_is_not_there_in_time_has_the_limit(tmp_path: Path) -> None:
    program = (
        "import time\nwhile time.process_time() < 0.2: pass\n"  # CPU time is counted in ticks of 10 ms
        "print('accuracy 0.5000', flush=True); time.sleep(60)"
    )
    taken = time_to(0.98, [sys.executable, "-c", program], tmp_path, limit=patient(2))
    assert (taken.seconds, taken.line, taken.reached) == (patient(2), "accuracy 0.5000", False)
    reached = time_to(0.4, [sys.executable, "-c", program], tmp_path, limit=patient(60))
    assert reached.reached and reached.cpu > 0
    with pytest.raises(SystemExit, match="ended without 98%"):
        time_to(0.98, [sys.executable, "-c", "print('accuracy 0.5')"], tmp_path, limit=patient(60))


@pytest.mark.soak
@pytest.mark.multi
@pytest.mark.timeout(400)
def test_recipes_and_tandem_come_to_an_accuracy(few: Path, processes: Any) -> None:
    found = few / "found.json"
    few_samples = ["--accuracy", "0.01", "--samples", "480", "--data-dir", few, "--json", found]
    command = [sys.executable, PROGRAMS / "time_to_98.py", *few_samples]
    code, said = processes.run([str(word) for word in command], limit=360, cwd=few)
    rows = json.loads(found.read_text())["rows"]
    assert code in (0, 1) and len(rows) == 8, said  # so few samples show no ratio
    assert not any("not reached" in row["outcome"] + row["control"] for row in rows)
