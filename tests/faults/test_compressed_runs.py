"""Whole runs with compressed gradients: killed and resumed bit for bit, as accurate as uncompressed ones."""

import json
import os
import signal
from typing import Any

import pytest
from small_runs import Runs, rank_processes

pytestmark = pytest.mark.timeout(500)

FLAGS = ("--nproc", 2, "--device", "cpu", "--threads", 1, "--checkpoint-every", 7, "--log-every", 15)
POWERSGD = ("--gradient-compression", "powersgd:2")


def test_powersgd_killed_and_resumed_has_the_bits_of_a_calm_run(runs: Runs) -> None:
    """One rank is killed, then all of them; the errors fed back are each rank's own, from the checkpoint."""
    calm = runs.finish("launch", "calm", *FLAGS, *POWERSGD, "--steps", 60)
    broken = runs.start("launch", "broken", *FLAGS, *POWERSGD, "--steps", 60, delay=0.05)
    runs.wait_for_step("broken", 14)
    os.kill(rank_processes(broken.pid)["tandem-rank-1"], signal.SIGKILL)
    runs.wait_for_step("broken", 28)
    runs.processes.kill(broken)
    runs.processes.wait(broken)
    summary = runs.finish("launch", "broken", *FLAGS, *POWERSGD, "--steps", 60, delay=0.05)
    assert summary["resumed_from_step"] >= 28
    assert summary["weights_sha256"] == calm["weights_sha256"]
    calm_lines, broken_lines = (
        [json.loads(line).get("scores") for line in (runs.folder / run / "metrics.jsonl").open()]
        for run in ("calm", "broken")
    )
    assert broken_lines == calm_lines and any(calm_lines)


@pytest.mark.soak
def test_digits_comes_to_the_accuracy_of_uncompressed_gradients(
    runs: Runs, tmp_path_factory: Any
) -> None:
    data = tmp_path_factory.getbasetemp().parent / "digits"
    flags = ("--task", "digits", "--data-dir", data, "--epochs", 2, "--nproc", 2, "--device", "cpu")
    rest = ("--threads", 1, "--metrics", 0, "--metrics-linger", 0)
    accuracy = {}
    for name in ("none", "powersgd"):
        words = ("launch", *flags, *rest, "--run-dir", f"as-{name}", "--gradient-compression", name)
        command = [*runs.command("launch", name)[:3], *map(str, words)]
        code, output = runs.processes.run(command, limit=400, cwd=runs.folder, env=runs.environment)
        assert code == 0, output
        accuracy[name] = runs.summary(f"as-{name}")["eval"]["accuracy"]
    assert accuracy["none"] > 0.97 and accuracy["powersgd"] > accuracy["none"] - 0.005, accuracy
