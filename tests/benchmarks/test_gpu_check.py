"""benchmarks/gpu_check.py. Without a GPU it passes on the played one; a bare loop runs on CPUs, made tiny."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gpu_check import Check, beside_bare_loops
from patience import patient

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"


@pytest.mark.slow
def test_a_machine_without_a_gpu_plays_one(tmp_path: Path, processes: Any) -> None:
    found = tmp_path / "gpu.json"
    only = ("doctor", "killed", "two-ranks", "branches", "synchronisations", "verify-resume")
    limit = patient(300)
    command = [sys.executable, PROGRAM, "--only", *only, "--json", found, "--seconds", str(limit)]
    code, said = processes.run([str(word) for word in command], limit=300, cwd=tmp_path)
    assert code == 0, said
    assert "one is played by the CPU, and nothing is said of speed" in said
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert rows["a rank killed, --workers 2"]["outcome"] == "the undisturbed run's bits"
    assert rows["two ranks on one GPU, one killed"]["outcome"] == "the undisturbed run's bits"
    assert rows["fp16, --clip-norm"]["passed"] and rows["a task with freeze()"]["passed"]
    assert rows["waits of the host for the device"]["outcome"] == "0.00 a step, on the played GPU"
    assert rows["verify-resume"]["outcome"] == "not measured: needs a GPU"
    assert rows["verify-resume"]["passed"] is None


@pytest.mark.soak
def test_a_step_beside_that_of_a_bare_loop(tmp_path: Path) -> None:
    check = Check(played=False, folder=tmp_path, deadline=time.monotonic() + patient(120))
    row = beside_bare_loops(check, "tiny", "cpu", 1, names=["Gpt124m"])[0]
    assert row.name == "a step of Gpt124m, 2 samples, not compiled" and row.outcome.endswith(" ms")
