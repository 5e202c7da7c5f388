"""Signals become a flag, and nothing else: whoever reads the flag decides what it means."""

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tandem import running
from tandem.errors import StoppedError
from tandem.timeouts import REPEAT_WINDOW_SECONDS

SCHEDULERS_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""What schedulers send some time before they end a job, where they are told to."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, *SCHEDULERS_SIGNALS)
IGNORED_BY_FORK_SERVER = (*STOP_SIGNALS, signal.SIGHUP)


def handed_on(number: int) -> int:
    """What a process that got `number` sends to those it has started: they ignore a hangup (deaf.py)."""
    return signal.SIGTERM if number == signal.SIGHUP else number


class StopFlag:
    """Set by the first stop signal; counts interrupts that come later than a repeat.

    A scheduler signals the whole process tree and the agent forwards the same signal, so a rank may see
    one stop several times: all within `REPEAT_WINDOW_SECONDS` count as one.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self.at: float | None = None
        """When the first one came, by the monotonic clock."""
        self.interrupts = 0
        self.received: dict[str, int] = {}  # by name, repeats within the window left out
        self._last = float("-inf")
        self.is_heeded = False
        """Whether training has come to where each step reads this; until then nothing is to be saved."""
        self.is_torchruns = False
        """Whether torchrun hands signals on: its ranks hear the first Ctrl-C, and SIGTERM at the second."""
        self._before: dict[int, Any] = {}
        self._is_ending = False
        self._wake: int | None = None  # where the interpreter writes the numbers that a listener reads

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signal_number).name if self.signal_number is not None else "none"

    def install(self) -> "StopFlag":
        """Take over the stop signals of this process (main thread only).

        A hangup (the terminal is closed) is one of them, unless it is ignored already, as under nohup. A
        script's own handler for what schedulers send stays.
        """
        own = [number for number in SCHEDULERS_SIGNALS if callable(signal.getsignal(number))]
        for number in {*STOP_SIGNALS, *_hangup()}.difference(own):
            self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        running.now()  # begins outside of a handler
        hear_stop_signals()
        return self

    @contextmanager
    def ending(self) -> Iterator[None]:
        """A signal ends this block at once, in which there is nothing to save. Raises StoppedError."""
        self._is_ending = True
        try:
            yield
        finally:
            self._is_ending = False
        self._end()  # it came before, or the block has caught the error

    def _end(self) -> None:
        if self:
            raise StoppedError(f"{self.name} came before training started; nothing to save")

    def listen(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Have a thread call `first` at the first signal, and `second` at the second Ctrl-C.

        It hears them also while the main thread, which is to call this, waits in C, where no handler of
        Python's runs.
        """
        ours, wake = os.pipe()
        os.set_blocking(wake, False)
        self._wake = wake
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_be_woken_no_more)  # a signal to a child is none to this process
        work = threading.Thread(target=self._listen, args=(ours, first, second), daemon=True)
        work.name = "tandem-signals"
        work.start()

    def _listen(self, ours: int, first: Callable[[], None], second: Callable[[], None]) -> None:
        has_said = False
        while number := os.read(ours, 1)[0]:
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
        """Give the stop signals back to who had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._wake is not None:
            signal.set_wakeup_fd(-1)
            os.write(self._wake, b"\0")
            os.close(self._wake)
            self._wake = None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        if self._is_ending:
            self._count(number)
            self._end()
        elif self._wake is None:
            self._count(number)
        else:  # the listener counts: this may come late, and seem another one
            self._is_first(number, running.now())

    def _count(self, number: int) -> None:
        now = running.now()
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
            self.signal_number, self.at = number, now


def stop_together(with_this_process: Callable[[int], None]) -> None:
    """Have Ctrl-Z stop what is in other process groups, too: `with_this_process` sends it a signal."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        with_this_process(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # until somebody sends SIGCONT
        with_this_process(signal.SIGCONT)

    if signal.getsignal(signal.SIGTSTP) is signal.SIG_DFL:
        signal.signal(signal.SIGTSTP, stop)


def _be_woken_no_more() -> None:
    with suppress(ValueError):
        signal.set_wakeup_fd(-1)


def _hangup() -> tuple[signal.Signals, ...]:
    return () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)


@contextmanager
def left_at_stop_signals(code: int) -> Iterator[None]:
    """A block in which a stop signal ends this process at once, with `code`: nothing is there to be saved."""

    def leave(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    before = {number: signal.signal(number, leave) for number in (*STOP_SIGNALS, *_hangup())}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


@contextmanager
def ended_by_stop_signals() -> Iterator[None]:
    """A block in which stop signals end this process at once: a wait in C, which no handler interrupts."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler or signal.SIG_DFL)


def hear_stop_signals() -> None:
    """Let through what was sent since this process was forked; to be called when its handlers stand."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def default_signals(spares: bool = False) -> None:
    """Python's own handlers instead of a fork server's deafness; what was sent meanwhile is heard.

    `spares`: see `spare_who_does_not_know`.
    """
    default_handlers()
    if spares:
        spare_who_does_not_know()
    hear_stop_signals()


def spare_who_does_not_know() -> None:
    """A program without a handler for SIGUSR1 and SIGUSR2 does not end by them.

    A scheduler sends them to the whole process tree, and the agent asks such a program to stop by SIGTERM.
    Python is not told that they are ignored: some programs install no handler where they find another one.
    """
    for number in SCHEDULERS_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).signal(int(number), ctypes.c_void_p(int(signal.SIG_IGN)))


def default_handlers(hears_hangups: bool = True) -> None:
    """The same, and what was sent meanwhile still waits for somebody to hear it (`hear_stop_signals`)."""
    for number in IGNORED_BY_FORK_SERVER:
        if hears_hangups or number != signal.SIGHUP:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore_stop_signals() -> None:
    """Make this process, and those forked from it until they decide otherwise, deaf to stop signals."""
    for number in IGNORED_BY_FORK_SERVER:
        signal.signal(number, signal.SIG_IGN)
