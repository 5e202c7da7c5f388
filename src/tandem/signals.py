"""Signals become a flag, and nothing else: whoever reads the flag decides what it means."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tandem.timeouts import REPEAT_WINDOW_SECONDS

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
IGNORED_BY_FORK_SERVER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


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
        self.interrupts = 0
        self.received: dict[str, int] = {}  # by name, repeats within the window left out
        self._last = float("-inf")
        self._before: dict[int, Any] = {}

    def __bool__(self) -> bool:
        return self.signal_number is not None

    @property
    def name(self) -> str:
        return signal.Signals(self.signal_number).name if self.signal_number is not None else "none"

    def install(self) -> "StopFlag":
        """Take over the stop signals of this process (main thread only).

        A hangup (the terminal is closed) is one of them, unless it is ignored already, as under nohup.
        """
        hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
        for number in (*STOP_SIGNALS, *hangup):
            self._before[number] = signal.signal(number, self._handle) or signal.SIG_DFL
        hear_stop_signals()
        return self

    def uninstall(self) -> None:
        """Give the stop signals back to who had them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._last > REPEAT_WINDOW_SECONDS and number == signal.SIGINT:
            self.interrupts += 1
        if now - self._last > REPEAT_WINDOW_SECONDS:
            name = signal.Signals(number).name
            self.received[name] = self.received.get(name, 0) + 1
        self._last = now
        if self.signal_number is None:
            self.signal_number = number


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


def ignore_stop_signals() -> None:
    """Make this process, and those forked from it until they decide otherwise, deaf to stop signals."""
    for number in IGNORED_BY_FORK_SERVER:
        signal.signal(number, signal.SIG_IGN)
