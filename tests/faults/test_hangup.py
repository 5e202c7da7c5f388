"""A terminal that is closed stops a run as SIGTERM does; a second Ctrl-C ends whatever does not listen."""

import contextlib
import fcntl
import getpass
import os
import pty
import select
import signal
import sys
import tempfile
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from patience import patient
from program_files import program_text
from tandem.launch.kill import processes_of
from tandem.run.directory import RunDir
from tandem.timeouts import REPEAT_WINDOW_SECONDS

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]

LONG = ("--steps", 100_000, "--checkpoint-every", "20", "--log-every", "5")


CHATTY = program_text("hangup_chatty")


SCRIPT = program_text("hangup_script")


@pytest.fixture
def chatty(runs: Runs) -> tuple[object, ...]:
    """A task that prints at each step, as people's do."""
    (runs.folder / "chatty.py").write_text(CHATTY)
    return "--task", "chatty.py:Chatty"


def wait_for_a_save(runs: Runs, run: str) -> None:
    """A machine that does much else takes a minute to start two nodes."""
    runs.until(lambda: bool(runs.events(run, "checkpoint")), "save", limit=200.0)


class Terminal:
    """One that a process can have as its own; it reads what is written, until it is closed."""

    def __init__(self) -> None:
        self._ours, self.theirs = pty.openpty()
        self._closing = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        while not self._closing.is_set():
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    os.read(self._ours, 65536)
                except OSError:  # nobody has it open at the other end
                    return

    def close(self) -> None:
        if not self._closing.is_set():
            self._closing.set()
            self._reader.join()
            os.close(self._ours)


@contextlib.contextmanager
def in_a_terminal(runs: Runs, command: Sequence[object]) -> Iterator[Any]:
    """It has a terminal of its own, which is closed at the end of the block."""
    terminal = Terminal()
    try:
        process = runs.processes.start(
            list(command),
            cwd=runs.folder,
            env=runs.environment,
            stdin=terminal.theirs,
            stdout=terminal.theirs,
            stderr=terminal.theirs,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal.theirs)
        yield process
    finally:
        terminal.close()


def test_closing_the_terminal_saves_and_stops(runs: Runs, chatty: tuple[object, ...]) -> None:
    command = runs.command("launch", "closed", *LONG, *chatty, delay=0.01)
    with in_a_terminal(runs, command) as process:
        wait_for_a_save(runs, "closed")
    assert process.wait(timeout=patient(150)) == 143
    summary = runs.summary("closed")
    assert summary["state"] == "stopped" and summary["exit_code"] == 143
    assert summary["last_checkpoint_step"] == summary["global_step"] >= 20


@pytest.mark.parametrize("verb", ["launch", pytest.param("train", marks=pytest.mark.soak)])
def test_a_reader_that_goes_ends_no_run(runs: Runs, chatty: tuple[object, ...], verb: str) -> None:
    """`| head -1` has read enough before the nodes start."""
    nodes = ("--nodes", 2) if verb == "launch" else ()
    process = runs.start(verb, "unread", *nodes, *chatty, "--steps", 60)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=patient(150)) == 0
    assert runs.summary("unread")["state"] == "finished"


def test_closing_the_terminal_stops_a_script(runs: Runs) -> None:
    """Its words stay in its log, and printing to a terminal that is gone is no error of it."""
    (runs.folder / "script.py").write_text(SCRIPT)
    words = [sys.executable, "-m", "tandem", "launch", "--run-dir", "script", "script.py"]
    log = runs.folder / "script/log/rank-0.log"
    with in_a_terminal(runs, words) as process:
        runs.until(lambda: log.exists() and "here" in log.read_text(), "first words")
    assert process.wait(timeout=patient(150)) == 143
    assert "heard" in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.soak
def test_a_run_under_nohup_outlives_its_terminal(runs: Runs) -> None:
    def ignore_hangups() -> Any:
        return signal.signal(signal.SIGHUP, signal.SIG_IGN)

    words = runs.command("train", "nohup", "--steps", 60, "--checkpoint-every", "20", delay=0.01)
    process = runs.processes.start(words, cwd=runs.folder, env=runs.environment, preexec_fn=ignore_hangups)
    wait_for_a_save(runs, "nohup")
    process.send_signal(signal.SIGHUP)
    code, output = runs.processes.wait(process)
    assert code == 0, output


@pytest.fixture
def nothing_left(runs: Runs) -> Iterator[None]:
    """A temporary folder of the test's own is empty in the end, though nodes were killed in it."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:  # pytest's are too long for a socket
        runs.environment = {**runs.environment, "TMPDIR": folder}
        yield
        assert [name for name in os.listdir(folder) if name != f"torchinductor_{getpass.getuser()}"] == []


@pytest.mark.soak
@pytest.mark.usefixtures("nothing_left")
def test_a_second_interrupt_ends_a_run_with_a_frozen_agent(runs: Runs) -> None:
    process = runs.start("launch", "frozen", "--nodes", 2, *LONG, delay=0.01)
    wait_for_a_save(runs, "frozen")
    os.kill(processes_of(RunDir(runs.folder / "frozen"))["node", 1], signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    time.sleep(REPEAT_WINDOW_SECONDS + 0.5)
    process.send_signal(signal.SIGINT)
    code, output = runs.processes.wait(process)
    assert code == 130, output
    runs.until(lambda: not rank_processes(process.pid), "end of all ranks")


@pytest.mark.usefixtures("nothing_left")
def test_a_stop_ends_a_run_with_a_frozen_agent_and_saves(runs: Runs) -> None:
    """The agent hears nothing, its rank stops with the others; the launcher does not wait for ever."""
    process = runs.start("launch", "stuck", "--nodes", 2, *LONG, "--shutdown-timeout", 20, delay=0.01)
    wait_for_a_save(runs, "stuck")
    os.kill(processes_of(RunDir(runs.folder / "stuck"))["node", 1], signal.SIGSTOP)
    process.send_signal(signal.SIGHUP)
    code, output = runs.processes.wait(process)
    assert code == 137 and "killing node 1" in output, output
    summary = runs.summary("stuck")
    assert summary["state"] == "stopped" and summary["last_checkpoint_step"] == summary["global_step"]
    runs.until(lambda: not rank_processes(process.pid), "end of all ranks")


def test_nodes_cut_off_from_their_launcher_save_and_are_waited_for(runs: Runs) -> None:
    """The kernel took the process that they were forked from: they were orphans that still wrote, unsaid."""
    process = runs.start("launch", "cut-off", "--nodes", 2, *LONG, delay=0.01)
    wait_for_a_save(runs, "cut-off")
    (fork_server,) = children(process.pid, "tandem-forks")
    ranks = rank_processes(process.pid).values()
    standard_input = {os.readlink(f"/proc/{pid}/fd/0") for pid in ranks}
    assert standard_input == {"/dev/null"}, "what a rank starts would read the terminal"
    os.kill(fork_server, signal.SIGKILL)
    code, output = runs.processes.wait(process)
    assert code == 200 and "forks the nodes was killed" in output, output
    assert not rank_processes(process.pid), "they have ended before the launcher did"
    summary = runs.summary("cut-off")
    assert summary["state"] == "stopped" and summary["last_checkpoint_step"] == summary["global_step"]


def test_a_stop_is_heard_while_nodes_are_not_started_yet(runs: Runs) -> None:
    """What they are forked from imports torch, for a minute on a machine that does much else."""
    process = runs.start("launch", "importing", "--nodes", 2, *LONG)
    runs.until(lambda: bool(children(process.pid, "tandem-forks")), "fork server")
    (fork_server,) = children(process.pid, "tandem-forks")
    os.kill(fork_server, signal.SIGSTOP)  # it would take for ever
    process.send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(process)
    assert code == 137, output
    assert output.splitlines()[-1] == "tandem: SIGTERM came before training started; nothing to save"
    runs.until(lambda: not Path(f"/proc/{fork_server}").exists(), "end of the fork server")


def children(parent: int, name: str) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            ppid = (entry / "stat").read_text().rpartition(")")[2].split()[1]
            if int(ppid) == parent and (entry / "comm").read_text().strip() == name:
                found.append(int(entry.name))
    return found
