"""`tandem health RUN_DIR` of a run that trains, whose agent is killed, and that finishes."""

import json
import os
import signal
import subprocess
import sys

import pytest
from small_runs import Runs

from patience import patient
from tree import of_launch

pytestmark = pytest.mark.timeout(300)


def health(runs: Runs, run: str, *flags: str) -> tuple[int, str]:
    """The exit code, and the line."""
    command = [sys.executable, "-m", "tandem", "health", run, *flags]
    done = subprocess.run(
        command, cwd=runs.folder, env=runs.environment, capture_output=True, text=True, timeout=patient(60)
    )
    assert done.stdout.count("\n") == 1 and not done.stderr, done
    return done.returncode, done.stdout


def test_a_run_is_healthy_while_it_trains_and_once_it_has_finished(runs: Runs) -> None:
    assert health(runs, "own") == (1, "unhealthy: own does not exist; give the directory of a run\n")
    flags = ("--steps", 100, "--checkpoint-every", 20)
    process = runs.start("launch", "own", *flags, "--nproc", 2, delay=0.05)
    runs.wait_for_step("own", 20)
    code, line = health(runs, "own")
    assert code == 0 and line.startswith("healthy: "), line
    agent = next(pid for pid, name in of_launch(process.pid).items() if name == "tandem-node-0")
    os.kill(agent, signal.SIGKILL)
    runs.processes.wait(process)
    code, line = health(runs, "own")
    assert code == 1 and line.startswith(f"unhealthy: process {agent} is gone"), line
    runs.finish("launch", "own", *flags, "--nproc", 2, delay=0.05)
    code, line = health(runs, "own", "--json")
    found = json.loads(line)
    assert (code, found["healthy"]) == (0, True) and "step 100" in found["reason"]
    assert not list((runs.folder / "own").glob("*.tmp")) and not list((runs.folder / "own").glob(".*"))
