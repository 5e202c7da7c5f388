"""Data in blocks, mixtures and packed documents: runs that are killed, and continued by other ranks."""

import os
import signal
import zlib
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from small_runs import Runs, rank_processes

from program_files import program_text
from tandem.data import tokens

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


# Documents packed into samples. Each run has two epochs of 41 steps and a part of the third.

PACKED_FLAGS = (
    *("--task", "small.py:Packed", "--checkpoint-every", 10),
    *("--micro-batch-size", 2, "--threads", 1),
)


@pytest.fixture
def packed_runs(runs: Runs) -> Runs:
    """A task on three files: documents of 1 (empty) to 200 tokens, of which a sample has 32."""
    (runs.folder / "small.py").write_text(program_text("packed_tokens_task"))
    draw = numpy.random.default_rng(0)
    for number, samples in enumerate((500, 490, 10)):
        text = draw.integers(1, 64, 32 * samples + 7)
        sizes = draw.geometric(1 / 25, len(text)) * draw.integers(0, 3, len(text))
        ends = numpy.cumsum(numpy.minimum(200, 1 + sizes)) - 1
        text[ends[ends < len(text)]] = 0
        text[-900:] = 0  # padding, which is empty documents: some micro-batches have no target
        text.astype("<u2").tofile(runs.folder / f"train-{number}.bin")
    return runs


@pytest.mark.parametrize(
    "ranks",
    [
        3,
        pytest.param(1, marks=pytest.mark.slow),
        *(pytest.param(n, marks=pytest.mark.soak) for n in (2, 4)),
    ],
)
def test_runs_on_packed_documents_that_are_killed_end_with_equal_bits(packed_runs: Runs, ranks: int) -> None:
    flags = (*PACKED_FLAGS, "--nproc", ranks, "--steps", 90)
    calm = packed_runs.finish("launch", "calm", *flags)
    process = packed_runs.start("launch", "hard", *flags, delay=SLOW)
    for number, step in enumerate((10, 30, 60)):
        packed_runs.wait_for_step("hard", step)
        victim = rank_processes(process.pid)[f"tandem-rank-{(number + 1) % ranks}"]
        os.kill(victim, signal.SIGKILL)
    packed_runs.wait_for_step("hard", 80)
    process.terminate()
    code, output = packed_runs.processes.wait(process)
    assert code == 143, output
    assert packed_runs.summary("hard")["restarts"] == 3
    hard = packed_runs.finish("launch", "hard", *flags, delay=SLOW)
    assert hard["weights_sha256"] == calm["weights_sha256"]


def test_any_number_of_ranks_continues_an_epoch_of_packed_documents(packed_runs: Runs) -> None:
    seen = packed_runs.folder / "seen"
    for ranks, steps in ((2, 11), (3, 23), (1, 32), (4, 41)):
        packed_runs.finish(
            "launch", "run", *PACKED_FLAGS, "--nproc", ranks, "--steps", steps, "--task.seen", seen
        )
    steps = trained(seen)
    assert list(steps) == list(range(1, 42)) and all(len(rows) == 24 for rows in steps.values())
    data = tokens(packed_runs.folder / "train-*.bin", 32, end_of_document=0)
    stored = Counter(zlib.crc32(torch.stack(data[index]).numpy().tobytes()) for index in range(len(data)))
    # Rows of padding are equal, all others are different.
    assert len(data) == 1000 and Counter(row for rows in steps.values() for row in rows) <= stored
