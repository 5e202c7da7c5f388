"""benchmarks/gpu_check.py. Without a GPU it passes on the played one; a bare loop runs on CPUs, made tiny."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient

pytestmark = [pytest.mark.multi, pytest.mark.timeout(400)]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
TASKS = PROGRAM.with_name("gpu_tasks.py")


def test_a_machine_without_a_gpu_plays_one(tmp_path: Path, processes: Any) -> None:
    found = tmp_path / "gpu.json"
    only = ("doctor", "killed", "two-ranks", "branches", "synchronizations", "snapshots", "verify-resume")
    limit = patient(300)
    command = [sys.executable, PROGRAM, "--only", *only, "--json", found, "--seconds", str(limit)]
    code, said = processes.run([str(word) for word in command], limit=300, cwd=tmp_path)
    assert code == 0, said
    assert "one is played by the CPU, and nothing is said of speed" in said
    rows = {row["name"]: row for row in json.loads(found.read_text())["rows"]}
    assert rows["a rank killed, --workers 2"]["outcome"] == "the undisturbed run's bits"
    assert rows["two ranks on one GPU, ddp, one killed"]["outcome"] == "the undisturbed run's bits"
    assert rows["fp16, --clip-norm"]["passed"] and rows["a task with freeze()"]["passed"]
    assert rows["waits of the host for the device"]["outcome"] == "0.00 a step, on the played GPU"
    assert rows["snapshots of the tiny model"]["passed"]
    assert rows["verify-resume"]["outcome"] == "not measured: needs a GPU"
    assert rows["verify-resume"]["passed"] is None


@pytest.mark.soak
def test_a_bare_loop_and_tandem_say_what_a_step_takes(tmp_path: Path, processes: Any) -> None:
    scale = ["--scale", "tiny", "--device", "cpu"]
    code, said = processes.run([sys.executable, str(TASKS), "Gpt124m", *scale], limit=120)
    assert code == 0 and float(said.split()[-1]) > 0, said
    times = tmp_path / "times.txt"
    command = ["launch", "--nproc", "1", "--task", f"{TASKS}:Gpt124m", "--task.scale", "tiny"]
    command += ["--batch-size", "2", "--steps", "5", "--device", "cpu", "--checkpoint-every", "never"]
    command += ["--metrics", "0", "--metrics-linger", "0", "--run-dir", str(tmp_path / "run")]
    variables = {**os.environ, "GPU_CHECK_TIMES": str(times)}
    command = [sys.executable, "-m", "tandem", *command]
    code, said = processes.run(command, limit=120, env=variables)
    assert code == 0 and float(times.read_text()) > 0, said
