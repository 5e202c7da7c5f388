"""A clock that counts only the time in which this process was running; for every timeout of another process.

A stopped process (Ctrl-Z, SIGSTOP, `docker pause`, `scontrol suspend`) receives nothing while the monotonic
clock continues. When it wakes up, all others seem to have been silent. Here a thread reads the monotonic
clock several times a second, and the time between two readings counts as at most LONGEST_GAP_SECONDS.
"""

import os
import threading
import time

from tandem.timeouts import LONGEST_GAP_SECONDS, RUNNING_TICK_SECONDS

_last = time.monotonic(), time.monotonic()
"""(monotonic clock, this clock) at the last reading.

Any thread replaces it as a whole. A signal handler may read the clock, so there is no lock.
"""
_ticks = False


def now() -> float:
    """Return seconds like `time.monotonic()`, without the time in which this process was stopped."""
    global _ticks
    if not _ticks:
        _ticks = True
        threading.Thread(target=_tick, name="tandem-running", daemon=True).start()
    return _look()


def _look() -> float:
    global _last
    then, shown = _last
    # Another thread may have stored a later reading in the meantime.
    moment = max(time.monotonic(), then)
    shown += min(moment - then, LONGEST_GAP_SECONDS)
    _last = moment, shown
    return shown


def _tick() -> None:
    while True:
        time.sleep(RUNNING_TICK_SECONDS)
        _look()


def _reset_in_child() -> None:
    """Restart the clock in a forked child, which has only the thread that forked."""
    global _ticks, _last
    # The clock itself continues: a deadline may be from before the fork.
    _ticks, _last = False, (time.monotonic(), _last[1])


os.register_at_fork(after_in_child=_reset_in_child)
