"""Errors that tell of a process which was killed, from real ones; and those that only look like it."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import reduction
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tandem.distributed.child_processes import killed_child

FORK = multiprocessing.get_context("fork")


class Dies(Dataset[Any]):
    def __init__(self, die: Callable[[], object]) -> None:
        self.die = die

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            self.die()
        return index


def kill_self(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def read(die: Callable[[], object], is_idle: bool = False) -> None:
    """In a main thread that hears of it by a signal, or, `is_idle`, when it asks for the next batch."""
    before = signal.getsignal(signal.SIGCHLD)
    batches = iter(DataLoader(Dies(die), batch_size=1, num_workers=1, multiprocessing_context=FORK))
    if is_idle:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        list(batches)
    finally:
        torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
        signal.signal(signal.SIGCHLD, before)


def pool() -> None:
    with ProcessPoolExecutor(1, mp_context=FORK) as workers:
        workers.submit(kill_self).result()


def spawn() -> None:
    torch.multiprocessing.start_processes(kill_self, nprocs=1, start_method="fork")


def command() -> None:
    code = "import os; os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code], check=True)


def pipe() -> None:
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=kill_self)
    child.start()
    theirs.close()
    child.join()
    ours.recv()


def handle() -> None:
    """A tensor of a loader process that is killed between its batch and the batch's descriptor."""
    ours, theirs = FORK.Pipe()
    child = FORK.Process(target=time.sleep, args=(60,))
    child.start()
    theirs.close()
    ours.send("read by nobody: with it unread, the end is a reset")
    child.kill()
    child.join()
    reduction.recv_handle(ours)


def wrapped() -> None:
    try:
        command()
    except subprocess.CalledProcessError as error:
        raise ValueError("the data could not be read") from error


def own_error() -> None:
    read(lambda: (_ for _ in ()).throw(OSError(5, "Input/output error")))


def own_exit() -> None:
    read(lambda: os._exit(3))


def failed_command() -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)


def a_network() -> None:
    child = FORK.Process(target=kill_self)
    child.start()
    child.join()
    raise ConnectionResetError("the server has gone")


@pytest.fixture(autouse=True)
def nothing_killed_before() -> None:
    """What other tests of this process have killed is no reason for its errors."""
    multiprocessing.process._dangling.clear()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fails",
    [lambda: read(kill_self), lambda: read(kill_self, True), pool, spawn, command, pipe, handle, wrapped],
    ids=["loader by signal", "loader by waiting", "pool", "spawn", "command", "pipe", "handle", "wrapped"],
)
def test_a_killed_helper_is_told_from_an_error(fails: Callable[[], None]) -> None:
    with pytest.raises(Exception) as raised:
        fails()
        time.sleep(10)  # until the signal's handler raises
    found = killed_child(raised.value)
    assert found is not None, raised.value
    assert found[1] == 128 + signal.SIGKILL and "SIGKILL" in found[0]


@pytest.mark.parametrize("fails", [own_error, own_exit, failed_command, a_network])
def test_an_error_of_its_own_is_none(fails: Callable[[], None]) -> None:
    with pytest.raises(Exception) as raised:
        fails()
    assert killed_child(raised.value) is None, raised.value


def test_after_it_the_end_of_a_loader_process_raises_nothing() -> None:
    """torch's handler of SIGCHLD raised in the code that dealt with the first error: it ended with 1."""
    before = signal.getsignal(signal.SIGCHLD)
    batches: Any = iter(DataLoader(Dies(print), batch_size=1, num_workers=1, multiprocessing_context=FORK))
    assert signal.getsignal(signal.SIGCHLD) != before
    try:
        assert killed_child(ConnectionResetError("the data of a batch")) is None
        batches._workers[0].kill()
        time.sleep(1)  # a wait() here would reap it, and torch's handler would see nothing
    finally:
        torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
        signal.signal(signal.SIGCHLD, before)
