"""The time while this process ran, for every deadline by which somebody is judged.

A process that is stopped (Ctrl-Z, SIGSTOP, `docker pause`, `scontrol suspend`) hears nobody, and the
monotonic clock goes on meanwhile: when it wakes up, all others seem to have been silent. Here a thread looks
at that clock several times a second, and what lies between two looks counts as LONGEST_GAP_SECONDS at most.
"""

import os
import threading
import time

from tandem.timeouts import LONGEST_GAP_SECONDS, RUNNING_TICK_SECONDS

_last = time.monotonic(), time.monotonic()
"""The monotonic clock at the last look, and what this clock showed then. It is replaced as a whole, by any
thread: a signal handler may look, too, so there is no lock."""
_ticks = False


def now() -> float:
    """Seconds as of `time.monotonic()`, without those in which this process was stopped."""
    global _ticks
    if not _ticks:
        _ticks = True
        threading.Thread(target=_tick, name="tandem-running", daemon=True).start()
    return _look()


def _look() -> float:
    global _last
    then, shown = _last
    moment = max(time.monotonic(), then)
    shown += min(moment - then, LONGEST_GAP_SECONDS)
    _last = moment, shown
    return shown


def _tick() -> None:
    while True:
        time.sleep(RUNNING_TICK_SECONDS)
        _look()


def _reset_in_child() -> None:
    """In a forked child, which has no thread but the one that forked."""
    global _ticks, _last
    _ticks, _last = False, (time.monotonic(), _last[1])


os.register_at_fork(after_in_child=_reset_in_child)
