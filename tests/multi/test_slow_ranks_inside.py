"""A slow rank is named though all ranks wait for each other inside the step, and nobody else is.

The other ranks sleep for some of each step, so that several of these jobs fit on two cores.
"""

import json
import os
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from forked_ranks import in_ranks
from needs import require_strategy
from patience import patient
from program_files import program_text
from tandem.distributed.group import ProcessGroup
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import StepTimes

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

SLOW = 1
RANKS = 3
TASK = ("--task", "task.py:SlowRank", "--device", "cpu", "--threads", 1)
ENDLESS = ("--steps", 1_000_000, "--log-every", 10, "--eval-every", "never", "--checkpoint-every", "never")
CASES: dict[str, tuple[object, ...]] = {
    "fsdp": (*TASK, *ENDLESS, "--strategy", "fsdp"),
    "batchnorm": (*TASK, *ENDLESS, "--sync-batchnorm"),
    "collective": (*TASK, *ENDLESS, "--task.shares", "true"),
    "loop": ("loop.py",),
    "script": ("script.py",),
    "script with fsdp": ("script.py",),
}


def first_straggler(folder: Path, process: Any, seconds: float = 150.0) -> dict[str, Any]:
    """Return the first event about a straggler; fails if the process ends or none comes."""
    events = folder / "run" / "events.jsonl"
    deadline = time.monotonic() + patient(seconds)
    while True:
        lines = events.read_text().splitlines() if events.exists() else []
        found = [line for line in lines if '"straggler"' in line and line.endswith("}")]
        if found:
            return dict(json.loads(found[0]))
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "no rank was named"
        time.sleep(0.2)


def start(processes: Any, tmp_path: Path, case: str, slow: int) -> Any:
    """Start the program of a case; no rank is slow if `slow` is -1."""
    if "fsdp" in case:
        require_strategy("fsdp")
    for name, program in {"task": "task", "loop": "loop", "script": "collectives"}.items():
        (tmp_path / f"{name}.py").write_text(program_text(f"slow_rank_{program}"))
    kind = "fsdp" if "fsdp" in case else "own"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environment = kept | {"SLOW": str(slow), "KIND": kind, "TANDEM_THREADS": "1"}
    if case == "loop":
        environment |= {"TANDEM_LOG_EVERY": "10", "TANDEM_CHECKPOINT_EVERY": "never"}
    ours = ("--nproc", RANKS, "--metrics", 0, "--metrics-linger", 0, "--run-dir", "run")
    of_task = ("--task.slow", slow) if "--task" in CASES[case] else ()
    words = ["-m", "tandem", "launch", *map(str, (*ours, *of_task, *CASES[case]))]
    return processes.start([sys.executable, *words], cwd=tmp_path, env=environment)


def cases(slow: Collection[str]) -> list[Any]:
    """All cases; those in `slow` belong to the gate, the others to the trials before a release."""
    return [
        pytest.param(case, marks=pytest.mark.slow if case in slow else pytest.mark.soak) for case in CASES
    ]


@pytest.mark.parametrize("case", cases(slow={"fsdp", "batchnorm", "script"}))
def test_the_slow_rank_is_named(processes: Any, tmp_path: Path, case: str) -> None:
    process = start(processes, tmp_path, case, SLOW)
    found = first_straggler(tmp_path, process)
    assert found["rank"] == SLOW, found
    assert found["phase"] == ("other" if "script" in case else "forward")
    assert found["own_seconds"] > 0.06  # it sleeps that long; the others are waiting meanwhile


@pytest.mark.parametrize("case", cases(slow={"fsdp"}))
def test_nobody_is_named_if_all_ranks_are_equal(processes: Any, tmp_path: Path, case: str) -> None:
    process = start(processes, tmp_path, case, -1)
    events = tmp_path / "run" / "events.jsonl"
    # The agent of a script knows when it starts the ranks, not when they train.
    begins, seconds = ('"world"', 40) if "script" in case else ('"training"', 25)
    deadline = time.monotonic() + patient(100)
    while not (events.exists() and begins in events.read_text()):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    time.sleep(seconds)  # a slow rank has been named by then
    assert process.poll() is None, process.communicate()[0]
    assert '"straggler"' not in events.read_text()


def waiting_steps(group: ProcessGroup) -> list[StepTimes]:
    """Two steps in whose forward rank 1 comes 0.3 s late to an all-reduce, of which the second counts."""
    clock = Clock()
    clock.measure(group.device)
    layer = nn.Linear(2, 1)
    taken: list[StepTimes] = []
    for _ in range(2):
        clock.begin_step()
        clock.enter("forward")
        if group.rank == 1:
            time.sleep(0.3)
        total = layer(torch.ones(2)).sum()
        dist.all_reduce(total.detach())
        clock.enter_backward(total)
        total.backward()
        clock.enter("optimizer")
        taken = clock.end_step()
    return taken


def test_a_wait_inside_the_forward_is_no_own_time(tmp_path: Path, free_port: int) -> None:
    (waiting,), (late,) = in_ranks(waiting_steps, 2, free_port, tmp_path)
    assert late.forward >= 0.3
    assert waiting.waits["forward"] > waiting.forward
    assert waiting.phases()["forward"] == pytest.approx(waiting.forward + waiting.waits["forward"])
    assert sum(waiting.phases().values()) == pytest.approx(waiting.total)
