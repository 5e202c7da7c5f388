"""Runs whose BatchNorm looks beyond its rank: killed and stopped ones end with the bits of calm ones."""

import json
import os
import signal

import pytest
from small_runs import Runs, rank_processes

pytestmark = [pytest.mark.timeout(400), pytest.mark.soak]

FLAGS = (
    "--nproc", 2, "--device", "cpu", "--threads", 1, "--checkpoint-every", 10, "--steps", 60,
    "--sync-batchnorm",
)  # fmt: skip


def test_stopped_and_killed_it_has_the_bits_of_a_calm_run(runs: Runs) -> None:
    calm = runs.finish("launch", "calm", *FLAGS, "--eval-every", 25)
    stopped = runs.start("launch", "broken", *FLAGS, "--eval-every", 25, delay=0.05)
    runs.wait_for_step("broken", 10)
    stopped.send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(stopped)
    assert code == 143, output
    first = runs.summary("broken")["global_step"]
    assert first < 60
    broken = runs.start("launch", "broken", *FLAGS, "--eval-every", 25, delay=0.05)
    runs.wait_for_step("broken", first // 10 * 10 + 10)
    os.kill(rank_processes(broken.pid)["tandem-rank-1"], signal.SIGKILL)
    code, output = runs.processes.wait(broken)
    assert code == 0, output
    summary = runs.summary("broken")
    assert (summary["restarts"], summary["planned_stops"]) == (1, 1) and summary["resumed_from_step"] >= first
    assert summary["weights_sha256"] == calm["weights_sha256"] and summary["loss"] == calm["loss"]
    calm_lines, broken_lines = (
        [json.loads(line).get("scores") for line in (runs.folder / run / "metrics.jsonl").open()]
        for run in ("calm", "broken")
    )
    assert broken_lines == calm_lines and any(calm_lines)
