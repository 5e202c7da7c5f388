"""A stop that comes while a killed rank is replaced: what only memory has is saved first."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from tandem.checkpoint.listing import newest_step
from tandem.run.directory import RunDir

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]

FLAGS = ("--steps", 100_000, "--checkpoint-every", 100_000, "--log-every", 5)


def logged(folder: Path) -> bool:
    journal = folder / "metrics.jsonl"
    return journal.exists() and len(journal.read_text().splitlines()) > 3


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        pytest.param(("--nproc", 2), signal.SIGTERM, id="one node"),
        pytest.param(("--nodes", 2), signal.SIGHUP, id="two nodes", marks=pytest.mark.soak),
    ],
)
def test_it_saves_what_no_checkpoint_has(runs: Runs, layout: tuple[Any, ...], number: int) -> None:
    process = runs.start("launch", "run", *layout, *FLAGS, delay=0.02)
    runs.until(lambda: logged(runs.folder / "run"), "steps")
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)
    process.send_signal(number)
    code, output = runs.processes.wait(process)
    assert code == 143, output
    summary, newest = runs.summary("run"), newest_step(RunDir(runs.folder / "run").checkpoints)
    assert summary["global_step"] == summary["last_checkpoint_step"] == newest
    assert newest is not None and newest > 15


def test_without_a_restart_left_it_is_a_stop_without_a_checkpoint(runs: Runs) -> None:
    """137, as of every stop that has saved nothing; 200 would say that peers were lost."""
    process = runs.start("launch", "run", "--nproc", 2, *FLAGS, "--max-restarts", 0, delay=0.02)
    runs.until(lambda: logged(runs.folder / "run"), "steps")
    rank = rank_processes(process.pid)["tandem-rank-1"]
    os.kill(rank, signal.SIGSTOP)  # without it no rank leaves the step, however busy the machine is
    os.kill(process.pid, signal.SIGTERM)
    os.kill(rank, signal.SIGKILL)
    code, output = runs.processes.wait(process)
    assert code == 137 and "Traceback" not in output, output
