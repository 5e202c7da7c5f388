"""`--batch-shares` in whole runs: a slow rank gets less, once and for all; a resume has the same bits."""

import os
import shutil
import signal

import pytest
from small_runs import Runs, rank_processes

pytestmark = pytest.mark.timeout(300)

SLOW = """
import time

import torch.distributed as dist
from small import Small


class Slow(Small):
    def loss(self, model, batch):
        if model.training:  # as a device works while the host waits for it; rank 1 is three times as slow
            time.sleep(0.002 * len(batch[0]) * (1 + 2 * dist.get_rank()))
        return super().loss(model, batch)
"""
FLAGS = (
    "--task", "slow.py:Slow", "--nproc", 2, "--device", "cpu", "--threads", 1, "--batch-shares", "auto",
    "--steps", 60, "--checkpoint-every", 25, "--eval-every", "never", "--log-every", 10,
)  # fmt: skip


@pytest.mark.slow
def test_the_shares_are_measured_once_and_a_killed_run_has_the_bits_of_one_from_its_checkpoint(
    runs: Runs,
) -> None:
    (runs.folder / "slow.py").write_text(SLOW)
    broken = runs.start("launch", "broken", *FLAGS)
    runs.wait_for_step("broken", 25)
    step = runs.folder / "broken" / "checkpoints" / "step-000000025"
    shutil.copytree(step, runs.folder / "again" / "checkpoints" / step.name)
    os.kill(rank_processes(broken.pid)["tandem-rank-1"], signal.SIGKILL)
    code, output = runs.processes.wait(broken)
    assert code == 0, output
    (measured,) = runs.events("broken", "batch_shares")
    first, second = measured["sizes"]
    assert first + second == 24 and first > 1.5 * second, measured
    assert measured["step"] == 20 and output.count("batch shares after 20 steps") == 1, output
    summary = runs.summary("broken")
    assert summary["restarts"] == 1 and summary["resumed_from_step"] >= 25

    code, output = runs.processes.wait(runs.start("launch", "again", *FLAGS))
    assert code == 0, output
    again = runs.summary("again")
    assert again["resumed_from_step"] == 25 and not runs.events("again", "batch_shares")
    assert f"{first}:{second} of a batch of 24" in output
    assert again["weights_sha256"] == summary["weights_sha256"]


@pytest.mark.soak
def test_shares_for_another_number_of_ranks_are_a_configuration_error(runs: Runs) -> None:
    (runs.folder / "slow.py").write_text(SLOW)
    said = {
        ("--batch-shares", "2:1:1"): "is for 3 ranks, but there are 2",
        ("--batch-shares", "3:1", "--elastic", "1:2"): "use --batch-shares auto",
    }
    started = {words: runs.start("launch", str(len(words)), *FLAGS, *words) for words in said}
    for words, process in started.items():
        code, output = runs.processes.wait(process)
        assert code == 2 and said[words] in output, output
