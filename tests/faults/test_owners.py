"""Two launches in one run folder: one owns it at any time, and its weights are those of a run alone."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from program_files import program_text
from tree import of_launch

pytestmark = pytest.mark.timeout(600)
LIMIT = 250.0  # two nodes import torch in half a minute, on a busy machine in two

EVERY = ("--checkpoint-every", "20", "--steps", "200", "--log-every", "10")
SLOW = 0.02  # seconds per step, so that the second one comes while the first trains


PATIENT = program_text("owners_patient")


def logged(runs: Runs, run: str) -> list[int]:
    lines = (runs.folder / run / "metrics.jsonl").read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if "eval" not in line]


def steps_saved(runs: Runs, run: str) -> list[int]:
    return [event["step"] for event in runs.events(run, "checkpoint")]


@pytest.mark.soak
@pytest.mark.parametrize(
    "second",
    [
        ("launch", "--nodes", 2),
        pytest.param(("train",), marks=pytest.mark.soak),
    ],
    ids=["nodes", "rank"],
)
def test_a_second_launch_gets_2_and_one_line_and_changes_nothing(runs: Runs, second: tuple[Any, ...]) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    (runs.folder / "patient.py").write_text(PATIENT)
    patient = ("--task", "patient.py:Patient", "--hang-timeout", 200)
    first = runs.start("launch", "one", "--nproc", 2, *EVERY, *patient)
    runs.wait_for_step("one", 40)
    verb, *flags = second
    code, output = runs.processes.wait(runs.start(verb, "one", *flags, *EVERY, "--resume", "never"), LIMIT)
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if "in use by another launch" in line]
    assert f"process {first.pid} on {os.uname().nodename}" in line and "another --run-dir" in line
    assert "Traceback" not in output
    (runs.folder / "go").touch()
    code, output = runs.processes.wait(first, LIMIT)
    assert code == 0, output
    assert runs.summary("one")["weights_sha256"] == undisturbed
    assert steps_saved(runs, "one") == list(range(20, 201, 20)), "no save has failed, none is of another"
    assert logged(runs, "one") == sorted(set(logged(runs, "one")))
    assert not list((runs.folder / "one").glob("checkpoints-before-*"))
    assert not (runs.folder / "one" / "owner").exists()


def test_a_killed_launch_is_taken_over_at_once(runs: Runs) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    first = runs.start("launch", "killed", *EVERY, "--nproc", 2, delay=SLOW)
    runs.wait_for_step("killed", 40)
    runs.processes.kill(first)
    code, output = runs.processes.wait(
        runs.start("launch", "killed", "--nproc", 2, *EVERY, delay=SLOW), LIMIT
    )
    assert code == 0, output
    assert f"over from process {first.pid} " in output and "which has exited" in output
    assert runs.summary("killed")["weights_sha256"] == undisturbed
    assert runs.summary("killed")["restarts"] == 1


def test_a_frozen_launch_that_comes_back_ends_with_2_and_publishes_nothing(runs: Runs) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    first = runs.start("launch", "frozen", *EVERY, "--nproc", 2, delay=SLOW)
    runs.wait_for_step("frozen", 40)
    frozen = list(of_launch(first.pid))
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)

    def attempt() -> bool:
        code, output = runs.processes.wait(
            runs.start("launch", "frozen", *EVERY, "--nproc", 2, delay=SLOW), LIMIT
        )
        assert code in (0, 2), output
        assert code == 2 or "which has not renewed its lease" in output, output
        return bool(code == 0)

    runs.until(attempt, "launch that takes the run over", limit=200)
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    code, output = runs.processes.wait(first, LIMIT)
    assert code == 2, output
    assert "was taken over by" in output and "Traceback" not in output
    summary = runs.summary("frozen")
    assert summary["state"] == "finished" and summary["weights_sha256"] == undisturbed
    steps = steps_saved(runs, "frozen")
    assert steps[-10:] == sorted(set(steps[-10:])) and steps[-1] == 200
    newest: Path = max((runs.folder / "frozen" / "checkpoints").glob("step-*"))
    assert newest.name == "step-000000200"


SCRIPT = program_text("owners_script")


@pytest.mark.soak
def test_a_script_owns_its_run_folder_too(runs: Runs) -> None:
    (runs.folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "tandem", "launch", "--run-dir", "s", "--metrics", "0", "script.py"]
    first = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    log = runs.folder / "s" / "log" / "rank-0.log"
    runs.until(lambda: log.exists() and "begun" in log.read_text(), "script that has begun")
    code, output = runs.processes.run(command, cwd=runs.folder, env=runs.environment)
    assert code == 2 and f"process {first.pid} on " in output, output
    first.terminate()
    code, output = runs.processes.wait(first, LIMIT)
    assert code == 143 or code == 137, output
