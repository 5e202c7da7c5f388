"""A rank runs out of memory: all ranks restart with a smaller micro-batch, which stays for the run.

The allocations that fail are real; which ones are tried is up to the task.
"""

import json
import os
import re
import signal
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

TRIED = 2
"""Passes before the first step: one counts FLOPs, and one settles DDP's buckets."""


@pytest.fixture
def short(runs: Runs) -> Runs:
    (runs.folder / "small.py").write_text(program_text("smaller_batches_task"))
    return runs


def limit(runs: Runs, where: str, rank: int, most: int, after: int = 0) -> None:
    runs.environment["SHORT"] = f"{where} {rank} {most} {after}"


def no_limit(runs: Runs) -> None:
    del runs.environment["SHORT"]


def causes(runs: Runs, run: str) -> list[str]:
    return [event["cause"] for event in runs.events(run, "recovered")]


def shown(runs: Runs, run: str) -> int:
    """The size on the page, which shows config.json."""
    return int(json.loads((runs.folder / run / "config.json").read_text())["micro_batch_size"])


@pytest.mark.parametrize(
    ("where", "rank", "after", "place"),
    [
        ("forward", 1, 0, ("--nproc", 2)),
        ("backward", 0, TRIED, ("--nproc", 2)),
        ("backward", 2, TRIED, ("--nproc", 3)),
        ("forward", 1, TRIED, ("--nodes", 2)),
    ],
)
def test_the_first_step_is_repeated_with_the_bits_of_a_run_of_that_size(
    short: Runs, where: str, rank: int, after: int, place: tuple[str, int]
) -> None:
    steps = ("--steps", 6, "--checkpoint-every", 6)
    limit(short, where, rank, 4, after)
    code, output = short.processes.wait(short.start("launch", "run", *place, *steps, "--max-restarts", 0))
    assert code == 0, output
    ranks = 3 if place == ("--nproc", 3) else 2
    first = 24 // ranks  # 12 and 6 are too many, or 8
    said = re.findall(r"rank (\d) on node \d ran out of memory .* of (\d+), .* use (\d+); rest", output)
    tried = {2: [(12, 6), (6, 3)], 3: [(8, 4)]}[ranks]
    assert tried[0][0] == first
    assert [tuple(map(int, each)) for each in said] == [(rank, *each) for each in tried], output
    size = tried[-1][1]
    assert shown(short, "run") == size
    assert len(causes(short, "run")) == 1 and "out of memory" in causes(short, "run")[0]
    no_limit(short)
    calm = short.finish("launch", "calm", "--nproc", ranks, *steps, "--micro-batch-size", size)
    assert short.summary("run")["weights_sha256"] == calm["weights_sha256"]


def test_in_mid_run_the_step_is_repeated_with_the_bits_of_a_resume_with_that_size(short: Runs) -> None:
    steps = ("--nproc", 2, "--steps", 12, "--checkpoint-every", 8)
    short.finish("launch", "before", *steps)
    size = ("--micro-batch-size", 6)
    calm = short.finish("launch", "calm", *steps, *size, "--resume", "before@8")["weights_sha256"]
    assert calm != short.summary("before")["weights_sha256"]
    limit(short, "backward", 1, 6, TRIED + 8)
    ended = short.finish("launch", "run", *steps, "--max-restarts", 0)
    assert ended["weights_sha256"] == calm
    (event,) = short.events("run", "recovered")
    assert event["steps_lost"] == 0 and shown(short, "run") == 6


def test_the_size_is_kept_after_a_kill_and_in_a_later_launch(short: Runs) -> None:
    steps = ("--nproc", 2, "--steps", 40, "--checkpoint-every", 5)
    limit(short, "forward", 1, 6)
    short.environment["DELAY"] = "0.05"
    launch = short.start("launch", "run", *steps)
    short.wait_for_step("run", 5)
    no_limit(short)
    del short.environment["DELAY"]
    os.kill(rank_processes(launch.pid)["tandem-rank-0"], signal.SIGKILL)
    short.until(lambda: len(short.events("run", "rank_killed")) == 1, "restart")
    short.until(lambda: len(short.events("run", "training")) >= 2, "step after the restart")
    launch.terminate()
    assert short.processes.wait(launch)[0] == 143
    code, output = short.processes.wait(short.start("launch", "run", *steps))
    assert code == 0, output
    assert "micro-batches of at most 6" in output and shown(short, "run") == 6
    calm = short.finish("launch", "calm", *steps, "--micro-batch-size", 6)
    assert short.summary("run")["weights_sha256"] == calm["weights_sha256"]


@pytest.mark.parametrize(
    ("verb", "where", "flags", "advice"),
    [
        ("launch", "backward", ("--nproc", 2, "--micro-batch-size", 4), "smallest micro-batch (2)"),
        ("launch", "evaluation", ("--nproc", 2, "--eval-batch-size", 9), "smaller --eval-batch-size"),
        ("train", "forward", (), "use --micro-batch-size 12"),
    ],
)
def test_an_error_that_no_smaller_batch_can_cure_says_what_to_do(
    short: Runs, verb: str, where: str, flags: tuple[Any, ...], advice: str
) -> None:
    limit(short, where, 0, 0, TRIED + 1)
    code, output = short.processes.wait(short.start(verb, "run", "--steps", 4, *flags))
    assert code == 1, output
    (line,) = [each for each in output.splitlines() if each.startswith("the task failed: ")]
    assert "memory" in line and advice in line, output
