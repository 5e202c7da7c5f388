"""Was a process that a rank has started for itself killed by a signal? Then it is as if the rank had been.

A killed loader, pool or spawned process reaches the rank as an error of its own code, and an error is final.
Where memory is short the kernel takes whichever process it likes, so it is as good a reason to start again as
a rank that it takes. Only errors that tell of another process count, not any that comes after such an end.
"""

import multiprocessing
import multiprocessing.process
import os
import re
import signal
import subprocess
import threading
import time
from typing import Any, cast

from tandem.timeouts import END_POLL_SECONDS, PIPE_SECONDS

LOADER = re.compile(r"DataLoader worker \(pid (\d+)\) is killed by signal: ([^.]*)\.")
LOADERS = re.compile(r"DataLoader worker \(pid\(s\) ([\d, ]+)\) exited unexpectedly")
"""What torch says, 2.6 to 2.15 (DataLoader.cpp, dataloader.py); the first from a handler of SIGCHLD."""
ASKED = (signal.SIGTERM, signal.SIGINT)
"""A program ends its own processes by these: they say nothing of those that it has not ended."""


def killed_helper(error: BaseException) -> tuple[str, int] | None:
    """(what was killed, the exit code of a rank that was killed so), if `error` comes from that.

    Call it first of all when a rank ends with an error. torch's handler of SIGCHLD raises where the program
    happens to be, also in the code that deals with an earlier sign of the same end; from here on it does not.
    """
    told = _end_of_news()
    return _found_in(error) or (None if told is None else _found_in(told))


def _end_of_news() -> RuntimeError | None:
    """Take torch's handler of SIGCHLD away; what it has raised just before that."""
    told = None
    while True:
        try:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return told
        except RuntimeError as error:
            told = error


def _found_in(error: BaseException) -> tuple[str, int] | None:
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if (found := _told_by(each)) is not None:
            who, number = found
            return f"{who} was killed ({signal.Signals(number).name})", 128 + number
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return None


def _told_by(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
        return _known(f"the command {error.cmd!r} started by this rank", -error.returncode)
    code = getattr(error, "exit_code", None)  # of torch.multiprocessing.spawn
    if type(error).__name__ == "ProcessExitedException" and isinstance(code, int) and code < 0:
        pid = getattr(error, "error_pid", "?")
        return _known(f"process {pid} started by this rank", -code)
    if isinstance(error, RuntimeError) and (found := LOADER.search(str(error))):
        numbers = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
        return _known(f"loader process {found[1]} of this rank", numbers.get(found[2], signal.SIGKILL))
    if isinstance(error, RuntimeError) and (found := LOADERS.search(str(error))):
        return _first_killed("loader process {} of this rank", [int(pid) for pid in found[1].split(",")])
    if type(error).__name__ == "BrokenProcessPool":  # it knows nothing of the process: mostly it was killed
        return _known("a pool process started by this rank", signal.SIGKILL)
    if _is_of_a_pipe(error):
        return _first_killed("process {} started by this rank", None)
    return None


def _is_of_a_pipe(error: BaseException) -> bool:
    """Whether multiprocessing has found the other end of a pipe gone; a network's errors are not that.

    Several of its modules read from pipes: `reduction`, not `connection`, receives a tensor's descriptor.
    """
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    file = trace.tb_frame.f_code.co_filename if trace is not None else ""
    is_end = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    return is_end and os.path.dirname(file) == os.path.dirname(multiprocessing.__file__)


def _known(who: str, number: int) -> tuple[str, int] | None:
    return (who, number) if number in signal.valid_signals() else None


def _first_killed(who: str, pids: list[int] | None) -> tuple[str, int] | None:
    """Of this process's own (`pids`, or all), as multiprocessing knows them, also those it has waited for.

    A pipe's end may be seen a moment before that of the process.
    """
    deadline = time.monotonic() + PIPE_SECONDS
    while (found := _killed_now(who, pids)) is None and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)
    return found


def _killed_now(who: str, pids: list[int] | None) -> tuple[str, int] | None:
    for child in list(cast(Any, multiprocessing.process)._dangling):
        if getattr(child, "_parent_pid", None) != os.getpid():
            continue
        try:
            pid, code = child.pid, child.exitcode
        except ValueError:  # closed
            continue
        if (pids is None or pid in pids) and code is not None and code < 0 and -code not in ASKED:
            return _known(who.format(pid), -code)
    return None
