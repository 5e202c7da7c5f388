"""Runs that are suspended, whole or in part: nobody is taken for hung, and no bit is another.

`python benchmarks/pause_trials.py --count N` does it at random moments, with all shapes.
"""

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest
from small_runs import Runs

pytestmark = pytest.mark.timeout(400)

PAUSE_SECONDS = 13.0  # longer than a stopped rank has, with --hang-timeout auto
STEPS = 600
STEP_SECONDS = 0.1


def tree_of(root: int) -> dict[int, str]:
    """{pid: name} of a process and of all below it."""
    parents, names = {}, {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            pid = int(entry.name)
            names[pid] = (entry / "comm").read_text().strip()
            parents[pid] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return {pid: names[pid] for pid in found}


def pause(pids: Iterable[int]) -> None:
    pids = list(pids)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if number == signal.SIGSTOP:
            time.sleep(PAUSE_SECONDS)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp"])
def test_pauses_of_all_and_of_each_agent_change_nothing(runs: Runs, strategy: str) -> None:
    flags = ("--steps", STEPS, "--checkpoint-every", 20, "--threads", 1, "--strategy", strategy)
    undisturbed = runs.undisturbed(*flags)
    process = runs.start("launch", "paused", "--nodes", 2, *flags, delay=STEP_SECONDS)
    runs.wait_for_step("paused", 20)
    pause(tree_of(process.pid))
    for node in (1, 0):
        time.sleep(2.0)
        pause(pid for pid, name in tree_of(process.pid).items() if name == f"tandem-node-{node}")
    runs.hurry()
    code, output = runs.processes.wait(process, 200)
    assert code == 0, output
    assert not runs.events("paused", "hang") and runs.summary("paused")["restarts"] == 0, output
    for node in (0, 1):
        said = (runs.folder / "paused" / "log" / f"node-{1 - node}.log").read_text()
        assert f"node {node}'s agent has sent no heartbeat" in said
        assert f"node {node}'s agent sends heartbeats again" in said
    assert runs.summary("paused")["weights_sha256"] == undisturbed
