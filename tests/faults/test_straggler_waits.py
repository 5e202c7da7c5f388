"""A slow rank is named though all ranks wait for it inside the step: fsdp, SyncBatchNorm, own collectives."""

import sys
import time
from typing import Any

import pytest
from small_runs import Runs

from program_files import program_text

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

RANKS, SLOW = 3, 1
KINDS = {
    "fsdp": ("task", ["--strategy", "fsdp"]),
    "SyncBatchNorm": ("task", ["--sync-batchnorm"]),
    "a collective of the model": ("task", ["--task.shares", "true"]),
    "a collective in a custom loop": ("loop", []),
    "a collective of a script": ("collectives", []),
    "fsdp in a script": ("collectives", []),
}


def start(runs: Runs, kind: str, slow: int) -> Any:
    program, flags = KINDS[kind]
    (runs.folder / "program.py").write_text(program_text(f"slow_rank_{program}"))
    ours = ["--nproc", str(RANKS), "--run-dir", "run", "--metrics", "0", "--metrics-linger", "0"]
    ours += ["--log-every", "5", "--threads", "1", "--device", "cpu"]
    if program == "task":
        task = ["--task", "program.py:SlowRank", "--task.slow", str(slow), "--batch-size", "240"]
        ours += [*task, "--epochs", "1000000", "--eval-every", "never", *flags]
    else:
        ours += ["program.py"]
    environment = {**runs.environment, "SLOW": str(slow), "KIND": kind.split()[0]}
    command = [sys.executable, "-m", "tandem", "launch", *ours]
    return runs.processes.start(command, cwd=runs.folder, env=environment)


@pytest.mark.parametrize("kind", KINDS)
def test_the_slow_rank_is_named(runs: Runs, kind: str) -> None:
    process = start(runs, kind, SLOW)
    runs.until(lambda: process.poll() is not None or bool(runs.events("run", "straggler")), "name", 150)
    assert process.poll() is None, runs.processes.wait(process)[1]
    named = runs.events("run", "straggler")
    assert {each["rank"] for each in named} == {SLOW}, named


@pytest.mark.parametrize("kind", ["fsdp", "a collective of the model"])
def test_nobody_is_named_where_all_are_equal(runs: Runs, kind: str) -> None:
    process = start(runs, kind, -1)
    runs.until(lambda: bool(runs.events("run", "training")), "training")
    time.sleep(20)
    assert process.poll() is None, runs.processes.wait(process)[1]
    assert runs.events("run", "straggler") == []
