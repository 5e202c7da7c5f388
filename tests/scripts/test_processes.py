"""What ranks of scripts start ends with them, and signals of schedulers and of the watchdog harm nothing."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from program_files import program_text
from tree import of_launch

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]
TRIALS = Path(__file__).parents[2] / "benchmarks" / "child_trials.py"

USR1 = program_text("processes_usr1")
EVERY_SIGNAL = program_text("processes_every_signal")
ORPHAN = program_text("processes_orphan")


LONG = ("daemon", "nested", "spawn", "popen", "loaders")


@pytest.mark.parametrize("kind", ["wrapper", *(pytest.param(kind, marks=pytest.mark.soak) for kind in LONG)])
def test_everything_below_a_rank_ends_with_it(kind: str) -> None:
    """By KILL of a rank, a hang, TERM and KILL of the launch; TANDEM_TRIALS rounds."""
    rounds = os.environ.get("TANDEM_TRIALS", "1")
    limit = str(patient(2))
    words = [sys.executable, str(TRIALS), "--rounds", rounds, "--limit", limit, kind]
    done = subprocess.run(words, capture_output=True, text=True, timeout=patient(580))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("knows", "sent", "whole_tree", "heard"),
    [
        ("SIGUSR1", "SIGUSR1", False, "SIGUSR1"),
        ("SIGTERM", "SIGUSR1", True, "SIGTERM"),
        pytest.param("SIGTERM", "SIGUSR2", False, "SIGTERM", marks=pytest.mark.soak),
        pytest.param("SIGUSR2", "SIGUSR2", True, "SIGUSR2", marks=pytest.mark.soak),
    ],
)
def test_what_a_scheduler_sends_before_the_end_is_a_stop(
    scripts: Any, knows: str, sent: str, whole_tree: bool, heard: str
) -> None:
    """A script's own handler has it; any other is asked by SIGTERM, also if all its tree was signalled."""
    (scripts.folder / "usr1.py").write_text(USR1)
    process = scripts.start(scripts.tandem("--nproc", 2, "usr1.py", knows))
    scripts.until(lambda: scripts.lives(0) and scripts.lives(1), process)
    for pid in of_launch(process.pid) if whole_tree else [process.pid]:
        os.kill(pid, getattr(signal, sent))
    code, said = scripts.wait(process)
    assert code == 143, said
    assert {each.name for each in scripts.folder.glob("heard-*")} == {f"heard-{heard}-{n}" for n in (0, 1)}


def test_a_hang_runs_no_handler_of_the_script_and_promises_no_stacks_that_are_not_there(scripts: Any) -> None:
    (scripts.folder / "every.py").write_text(EVERY_SIGNAL)
    process = scripts.start(scripts.tandem("--nproc", 2, "--hang-timeout", 2, "every.py"))
    places = [scripts.folder / f"runs-{rank}" for rank in (0, 1)]
    scripts.until(lambda: all(place.exists() and place.read_text() for place in places), process)
    os.kill(int(places[1].read_text()), signal.SIGSTOP)
    code, said = scripts.wait(process)
    assert code == 0, said
    assert not list(scripts.folder.glob("handled-*")), said
    (line,) = re.findall(r"stacks are in .*", said)
    assert "stacks-rank-0.txt" in line and "no stacks from rank 1" in line, said
    assert "every.py" in (scripts.folder / "run" / "log" / "stacks-rank-0.txt").read_text()
    assert not (scripts.folder / "run" / "log" / "stacks-rank-1.txt").read_text()


def test_what_a_finished_script_leaves_running_is_named_and_ended(scripts: Any) -> None:
    (scripts.folder / "orphan.py").write_text(ORPHAN)
    process = scripts.start(scripts.tandem("orphan.py"))
    code, said = scripts.wait(process)
    assert code == 0, said
    assert not of_launch(process.pid)
    assert re.search(r"python\S* \(process \d+\)", said), said
