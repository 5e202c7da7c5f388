"""Detect that a process started by a rank was killed by a signal, which counts like a killed rank.

A killed loader, pool or spawned process reaches the rank as an ordinary error, and an error is final. If
memory is short, the kernel may kill any process, so this justifies a restart as much as a killed rank does.
Only errors that report the end of another process count, not any error that follows it.
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
"""Messages of torch 2.6 to 2.15 (DataLoader.cpp, dataloader.py); the first is from a SIGCHLD handler."""
ASKED = (signal.SIGTERM, signal.SIGINT)
"""Programs end their own processes with these signals, so they do not indicate a failure."""


def killed_child(error: BaseException) -> tuple[str, int] | None:
    """Return (description, exit code of a rank killed by the same signal) if a killed child caused `error`.

    Call it first when a rank ends with an error. torch's SIGCHLD handler raises wherever the program happens
    to be, even in code that handles an earlier sign of the same end. After this call it no longer does.
    """
    last_error = stop_child_news()
    return _found_in(error) or (None if last_error is None else _found_in(last_error))


def stop_child_news() -> RuntimeError | None:
    """Remove torch's SIGCHLD handler; return the error that it raised just before.

    Call it before a rank that ends with an error kills its loader processes: the handler would raise.
    """
    # The handler may raise before it is removed, even here, so the removal is tried again.
    last_error = None
    while True:
        try:
            # Python sets and runs signal handlers only in the main thread.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return last_error
        except RuntimeError as error:
            last_error = error


def _found_in(error: BaseException) -> tuple[str, int] | None:
    seen = set[int]()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        if (found := _cause_of(each)) is not None:
            who, number = found
            return f"{who} was killed ({signal.Signals(number).name})", 128 + number
        seen.add(id(each))
        each = each.__cause__ or each.__context__
    return None


def _cause_of(error: BaseException) -> tuple[str, int] | None:
    if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
        return _known(f"the command {error.cmd!r} started by this rank", -error.returncode)
    code = getattr(error, "exit_code", None)  # of torch.multiprocessing.spawn
    # Compare its name, so that this module does not import torch.
    if type(error).__name__ == "ProcessExitedException" and isinstance(code, int) and code < 0:
        pid = getattr(error, "error_pid", "?")
        return _known(f"process {pid} started by this rank", -code)
    if isinstance(error, RuntimeError) and (found := LOADER.search(str(error))):
        # torch's message has only strsignal()'s text. An unknown text counts as a kill.
        numbers = {signal.strsignal(number): int(number) for number in signal.valid_signals()}
        return _known(f"loader process {found[1]} of this rank", numbers.get(found[2], signal.SIGKILL))
    if isinstance(error, RuntimeError) and (found := LOADERS.search(str(error))):
        return _first_killed("loader process {} of this rank", [int(pid) for pid in found[1].split(",")])
    # It has no exit code; in most cases the process was killed.
    if type(error).__name__ == "BrokenProcessPool":
        return _known("a pool process started by this rank", signal.SIGKILL)
    if _is_of_a_pipe(error):
        return _first_killed("process {} started by this rank", None)
    return None


def _is_of_a_pipe(error: BaseException) -> bool:
    """Return True if multiprocessing found the other end of a pipe closed; network errors do not count.

    Several of its modules read from pipes: `reduction`, for example, receives the descriptor of a tensor.
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
    """Find a killed process among this process's children (`pids`, or all), even one already waited for.

    The end of a pipe may be visible a moment before the end of the process.
    """
    deadline = time.monotonic() + PIPE_SECONDS
    while (found := _killed_now(who, pids)) is None and time.monotonic() < deadline:
        time.sleep(END_POLL_SECONDS)
    return found


def _killed_now(who: str, pids: list[int] | None) -> tuple[str, int] | None:
    # active_children() leaves out the processes that have ended.
    for child in list(cast(Any, multiprocessing.process)._dangling):
        # A forked process inherits the set, with its parent's children.
        if getattr(child, "_parent_pid", None) != os.getpid():
            continue
        try:
            pid = child.pid
            code = child.exitcode
        except ValueError:  # the process object is closed
            continue
        if (pids is None or pid in pids) and code is not None and code < 0 and -code not in ASKED:
            return _known(who.format(pid), -code)
    return None
