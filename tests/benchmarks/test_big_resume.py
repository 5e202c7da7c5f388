"""A state large enough to be read in place: the memory it takes, and that a run goes on from it exactly."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.soak, pytest.mark.timeout(600)]
PROGRAMS = Path(__file__).parents[2] / "benchmarks"


def ended(processes: Any, folder: Path, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "tandem", "launch", "--nproc", 2, "--run-dir", folder]
    command += ["--task", f"{PROGRAMS / 'big_task.py'}:Big", "--task.gigabytes", 0.3, "--batch-size", 8]
    command += ["--steps", steps, "--snapshot-every", "never", "--checkpoint-every", "never"]
    command += ["--metrics", 0, "--metrics-linger", 0, "--eval-every", "never"]
    code, said = processes.run([str(word) for word in command], limit=280)
    assert code == 0, said
    return dict(json.loads((folder / "summary.json").read_text()))


def test_two_ranks_go_on_from_a_large_state_as_if_they_had_not_stopped(
    tmp_path: Path, processes: Any
) -> None:
    whole = ended(processes, tmp_path / "whole", 3)
    assert ended(processes, tmp_path / "parts", 1)["weights_sha256"] != whole["weights_sha256"]
    assert ended(processes, tmp_path / "parts", 3)["weights_sha256"] == whole["weights_sha256"]


def test_its_memory_is_measured(tmp_path: Path, processes: Any) -> None:
    found = tmp_path / "row.json"
    flags = ["--gigabytes", "0.3", "--folder", str(tmp_path), "--json", str(found)]
    code, said = processes.run([sys.executable, str(PROGRAMS / "big_resume.py"), *flags], limit=560)
    assert code in (0, 1), said  # so small a state shows no multiple
    (row,) = json.loads(found.read_text())["rows"]
    assert row["outcome"].endswith(" s to load") and row["ratio"].endswith(" states per rank")
    state, most = (float(row[name].partition(" GB")[0].rpartition(" ")[2]) for name in ("control", "outcome"))
    assert state > 0.29 and most > state and row["seconds"] > 0
