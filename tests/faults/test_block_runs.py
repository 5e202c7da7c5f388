"""Data in blocks and mixtures: runs that are killed, and continued by another number of ranks."""

import os
import signal
from pathlib import Path

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(200)]

SLOW = 0.02  # seconds per step, so that a fault hits the middle
TASK = program_text("block_runs_task")


@pytest.mark.core
@pytest.mark.parametrize("mixed", ["true", pytest.param("false", marks=pytest.mark.slow)])
def test_a_killed_and_stopped_run_ends_with_equal_bits(runs: Runs, mixed: str) -> None:
    (runs.folder / "small.py").write_text(TASK)
    flags = ("--nproc", 2, "--task.mixed", mixed, "--steps", 80, "--checkpoint-every", 10, "--workers", 1)
    calm = runs.finish("launch", "calm", *flags)  # 41 steps an epoch, 58 in the mixture
    process = runs.start("launch", "hard", *flags, delay=SLOW)
    runs.wait_for_step("hard", 10)
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)  # resumes from the snapshot
    runs.wait_for_step("hard", 40)
    process.terminate()  # resumes from the checkpoint
    code, output = runs.processes.wait(process)
    assert code == 143, output
    stopped = runs.summary("hard")
    assert stopped["restarts"] == 1 and stopped["global_step"] < 80
    hard = runs.finish("launch", "hard", *flags, delay=SLOW)
    assert hard["resumed_from_step"] == stopped["global_step"]
    assert hard["weights_sha256"] == calm["weights_sha256"]


def trained(seen: Path) -> dict[int, list[int]]:
    """{step: the indices that its ranks trained on}"""
    lines = {tuple(map(int, line.split())) for line in seen.read_text().splitlines()}
    steps: dict[int, list[int]] = {}
    for step, *indices in sorted(lines):
        steps.setdefault(step, []).extend(indices)
    return steps


def test_another_number_of_ranks_continues_an_epoch_with_every_sample_once(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(TASK)
    seen = runs.folder / "seen"
    for ranks, steps in ((2, 11), (3, 25), (1, 41)):
        runs.finish("launch", "run", "--nproc", ranks, "--steps", steps, "--task.seen", seen)
    steps = trained(seen)
    assert list(steps) == list(range(41)) and all(len(indices) == 24 for indices in steps.values())
    indices = [index for each in steps.values() for index in each]
    assert len(set(indices)) == len(indices) == 1003 // 24 * 24


def test_other_blocks_are_refused_in_the_middle_of_an_epoch(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(TASK)
    runs.finish("launch", "run", "--steps", 10)
    (runs.folder / "changed").touch()
    code, output = runs.processes.wait(runs.start("launch", "run", "--steps", 20))
    lines = [line for line in output.splitlines() if "cannot resume" in line]
    assert code == 2 and "Traceback" not in output and "step 10" in lines[0] and "blocks" in lines[0], output
