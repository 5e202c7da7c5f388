"""A program that tests start as a fork is what a new interpreter would be, for whoever looks at it."""

import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import tree
from forked import SOURCE, Forked, may_be_forked

LAUNCH = [sys.executable, "-m", "tandem", "launch"]
OPTIONS = {"text": True, "stdout": subprocess.PIPE}


@pytest.mark.slow
def test_its_words_environment_folder_and_end(tmp_path: Path, processes: Any) -> None:
    environ = {**os.environ, "OF_THIS_TEST": "with = and\nmore"}
    words = ["--steps", "100000", "--run-dir", "run", "--metrics", "0", "--device", "cpu"]
    launch = processes.start([*LAUNCH, *words], cwd=tmp_path, env=environ)
    assert isinstance(launch, Forked) or os.environ.get("TEST_FORKS") == "0"
    deadline = time.monotonic() + 60
    while not (tmp_path / "run" / "log" / "rank-0.log").exists():  # of a rank: forked two times more
        assert launch.poll() is None and time.monotonic() < deadline, launch.communicate()[0]
        time.sleep(0.1)
    proc = Path(f"/proc/{launch.pid}")
    assert (proc / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")[1:] == [
        word.encode() for word in [*LAUNCH[1:], *words]
    ]
    assert b"OF_THIS_TEST=with = and\nmore" in (proc / "environ").read_bytes().split(b"\0")
    assert (proc / "cwd").resolve() == tmp_path
    assert os.getsid(launch.pid) == launch.pid
    assert len(tree.of_launch(launch.pid)) > 2
    os.kill(launch.pid, signal.SIGKILL)
    assert launch.wait(10) == -signal.SIGKILL


def test_its_exit_code_and_output(tmp_path: Path, processes: Any) -> None:
    code, said = processes.run([*LAUNCH, "--nodes", "two"], cwd=tmp_path)
    assert code == 2 and "--nodes" in said and "two" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([*LAUNCH, "--help"], OPTIONS),
        ([sys.executable, "-m", "tandem", "runs"], OPTIONS),
        (["/usr/bin/python3", *LAUNCH[1:], "--steps", "3"], OPTIONS),
        ([*LAUNCH, "--steps", "3"], {**OPTIONS, "env": {**os.environ, "OMP_NUM_THREADS": "7"}}),
        ([*LAUNCH, "--steps", "3"], {**OPTIONS, "env": {**os.environ, "PYTHONUNBUFFERED": "1"}}),
        ([*LAUNCH, "--steps", "3"], {**OPTIONS, "env": {**os.environ, "PYTHONPATH": "/elsewhere"}}),
        ([*LAUNCH, "--steps", "3"], {**OPTIONS, "preexec_fn": os.getpid}),
        ([*LAUNCH, "--steps", "3"], {**OPTIONS, "pass_fds": [5]}),
    ],
)
def test_what_starts_as_a_new_interpreter(command: list[str], options: dict[str, Any]) -> None:
    assert not may_be_forked(command, options)


def test_the_place_of_tandem_itself_changes_no_import() -> None:
    environ = {**os.environ, "PYTHONPATH": SOURCE}
    forks = os.environ.get("TEST_FORKS") != "0"
    assert may_be_forked([*LAUNCH, "--steps", "3"], {**OPTIONS, "env": environ}) is forks


def test_a_forked_process_collects_nothing_that_was_left_here() -> None:
    """Torch's store, left by an earlier test, waited in its destructor for a thread, and aborted a rank."""

    class Left:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if os.getpid() != here:
                os._exit(7)

    here = os.getpid()
    Left()
    if not (child := os.fork()):
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert gc.get_freeze_count() == 0
