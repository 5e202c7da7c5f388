"""Turn signals into a flag, and nothing else: the code that reads the flag decides what it means.

See docs/architecture.md#a-sigterm.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tandem import running_clock
from tandem.errors import StoppedError
from tandem.timeouts import REPEAT_WINDOW_SECONDS

SCHEDULERS_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that a scheduler can send some time before it ends a job."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *SCHEDULERS_SIGNALS)
IGNORED_BY_FORK_SERVER = (*STOP_SIGNALS, signal.SIGHUP)


def forwarded_as(number: int) -> int:
    """Return the signal to forward for `number`: SIGTERM for SIGHUP.

    Children ignore SIGHUP (fork_server_signals.py).
    """
    return signal.SIGTERM if number == signal.SIGHUP else number


class StopFlag:
    """A flag that the first stop signal sets; it also counts repeated interrupts.

    A scheduler signals the whole process tree and the agent forwards the same signal, so a rank may receive
    one stop several times. All signals within `REPEAT_WINDOW_SECONDS` count as one.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.at: float | None = None
        """When the first signal arrived, in seconds of `running_clock.now`."""
        self.interrupts = 0
        self.received: dict[str, int] = {}  # by name, without repeats within the window
        self._last = float("-inf")
        self.is_polled = False
        """True once training polls this flag at every step; before that there is nothing to save."""
        self.is_torchruns = False
        """Whether torchrun forwards signals.

        Its ranks get SIGINT at the first Ctrl-C, and SIGTERM at the second.
        """
        self._before: dict[int, Any] = {}
        self._is_ending = False
        self._wake: int | None = None  # where the interpreter writes signal numbers for the listener

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signal_number).name if self.signal_number is not None else "none"

    def install(self) -> "StopFlag":
        """Handle the stop signals of this process from now on (main thread only).

        SIGHUP (a closed terminal) is one of them, unless it is already ignored, as under nohup. A script's
        own handler for a scheduler's signals stays.
        """
        own = [number for number in SCHEDULERS_SIGNALS if callable(signal.getsignal(number))]
        for number in {*STOP_SIGNALS, *_hangup()}.difference(own):
            # None is a handler that was not installed from Python, which cannot be restored.
            self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        running_clock.now()  # starts its thread outside of a handler
        unblock_stop_signals()
        return self

    @contextmanager
    def exit_on_signal(self) -> Iterator[None]:
        """Let a signal end this block at once, because there is nothing to save. Raises StoppedError."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        self._end()  # the signal came before the block, or the block caught the error

    def _end(self) -> None:
        if self:
            raise StoppedError(f"{self.name} came before training started; nothing to save")

    def listen(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Call `first` in a thread at the first signal, and `second` at the second Ctrl-C.

        Call this from the main thread. It works even while that thread waits in C, where Python runs no
        handlers: the interpreter's C handler writes to a pipe (signal.set_wakeup_fd).
        """
        ours, wake = os.pipe()
        # set_wakeup_fd() requires it: a full pipe must not block the handler.
        os.set_blocking(wake, False)
        self._wake = wake
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_stop_wakeups)  # a child's signals are not this process's
        work = threading.Thread(target=self._listen, args=(ours, first, second), daemon=True)
        work.name = "tandem-signals"
        work.start()

    def _listen(self, ours: int, first: Callable[[], None], second: Callable[[], None]) -> None:
        has_said = False
        while number := os.read(ours, 1)[0]:
            # The pipe has every signal with a Python handler, such as a script's own SIGCHLD.
            if number not in self._before:
                continue
            self._count(number)
            if not has_said:
                has_said = True
                first()
            if self.interrupts > 1:
                second()
        os.close(ours)

    def uninstall(self) -> None:
        """Restore the previous handlers of the stop signals."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            # No signal has the number 0; it ends the listener.
            os.write(self._wake, b"\0")
            os.close(self._wake)
            self._wake = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            self._count(number)
            self._end()
        elif self._wake is None:
            self._count(number)
        else:  # the listener counts, because this handler may run late and look like another signal
            self._is_first(number, running_clock.now())

    def _count(self, number: int) -> None:
        now = running_clock.now()
        is_interrupt = number == signal.SIGINT or (self.is_torchruns and self.interrupts > 0)
        if now - self._last > REPEAT_WINDOW_SECONDS and is_interrupt:
            self.interrupts += 1
        if now - self._last > REPEAT_WINDOW_SECONDS:
            name = signal.Signals(number).name
            self.received[name] = self.received.get(name, 0) + 1
        self._last = now
        self._is_first(number, now)

    def _is_first(self, number: int, now: float) -> None:
        if self.signal_number is None:
            self.signal_number = number
            self.at = now


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer the signals that a fork server ignores, and their handlers, to the end of this block.

    A process that is started meanwhile is not killed by one. A handler that raises
    (`StopFlag.exit_on_signal`) never does so inside a fork, where Python drops an error of its fork hooks and
    leaves logging's lock locked.
    """
    deferred: list[int] = []
    handlers: dict[int, Any] = {}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_BY_FORK_SERVER)
    try:
        # The mask is this thread's. A signal that another thread receives runs its handler in the main one.
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in IGNORED_BY_FORK_SERVER}
            handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
            for number in handlers:
                signal.signal(number, lambda number, _frame: deferred.append(number))
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    for number in dict.fromkeys(deferred):
        handlers[number](number, None)


def stop_together(with_this_process: Callable[[int], None]) -> None:
    """Make Ctrl-Z also stop other process groups: `with_this_process(number)` sends them a signal."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        # Unlike SIGTSTP, it can be neither handled nor ignored.
        with_this_process(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until it receives SIGCONT
        with_this_process(signal.SIGCONT)

    # A shell without job control ignores it, and a program may handle it. Both stay.
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, stop)


def _stop_wakeups() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


def _hangup() -> tuple[signal.Signals, ...]:
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


@contextmanager
def exit_on_stop_signal(code: int) -> Iterator[None]:
    """Make a stop signal end this process at once with `code` in this block, which saves nothing."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    with _handled_by(leave, (*STOP_SIGNALS, *_hangup())):
        yield


@contextmanager
def default_stop_handlers() -> Iterator[None]:
    """Make stop signals end this process at once in this block, which waits in C where no handlers run."""
    with _handled_by(signal.SIG_DFL, STOP_SIGNALS):
        yield


@contextmanager
def _handled_by(handler: Any, numbers: Iterable[int]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous or signal.SIG_DFL)


def unblock_stop_signals() -> None:
    """Unblock the stop signals that were sent since this process was forked.

    Call this after installing handlers.
    """
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def default_signals(ignore_unhandled: bool = False) -> None:
    """Restore Python's own handlers in a fork of the fork server, and receive the pending signals.

    `ignore_unhandled`: see `ignore_unhandled_scheduler_signals`.
    """
    default_handlers()
    if ignore_unhandled:
        ignore_unhandled_scheduler_signals()
    unblock_stop_signals()


def ignore_unhandled_scheduler_signals() -> None:
    """Make SIGUSR1 and SIGUSR2 harmless to a program without a handler for them.

    A scheduler sends them to the whole process tree; the agent asks such a program to stop with SIGTERM. They
    are ignored in C only, behind Python's back, because some programs install no handler if they find another
    one.
    """
    for number in SCHEDULERS_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))


def default_handlers(default_hangup: bool = True) -> None:
    """Restore Python's own handlers; signals sent meanwhile stay pending until `unblock_stop_signals`."""
    for number in IGNORED_BY_FORK_SERVER:
        if default_hangup or number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stop_signals() -> None:
    """Make this process, and its forks until they change it, ignore stop signals."""
    for number in IGNORED_BY_FORK_SERVER:
        signal.signal(number, signal.SIG_IGN)
