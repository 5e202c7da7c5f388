"""What only the node's agent can keep, as it outlives ranks: activities, replays, signals, its health."""

import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from tandem.telemetry import health, metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.messages import Samples, Send
from tandem.telemetry.meter import ACTIVITIES

log = logging.getLogger("tandem.node")

STATE_OF = {
    "startup": "starting",
    "rendezvous": "rendezvous",
    "resume": "resuming",
    "train": "training",
    "eval": "evaluating",
    "checkpoint": "checkpointing",
    "drain": "draining",
}
"""The run's state while rank 0 is in an activity."""
ACTIVITY_OF = {state: activity for activity, state in STATE_OF.items()} | dict.fromkeys(
    metrics.FINAL_STATES, "drain"
)


class Activities:
    """Charges wall time to activities, exactly one at any moment; `now` is any clock in seconds.

    One that steps back counts as standing still. Thread-safe.
    """

    def __init__(self, now: float) -> None:
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._current, self._since = ACTIVITIES[0], now
        self._lock = threading.Lock()

    def enter(self, state: str, now: float) -> None:
        """From now on time belongs to this state of the run."""
        with self._lock:
            self._charge(now)
            self._current = ACTIVITY_OF[state]

    def take(self, now: float) -> list[Sample]:
        """What has been spent since the last call."""
        with self._lock:
            self._charge(now)
            spent, self._spent = self._spent, dict.fromkeys(ACTIVITIES, 0.0)
        return [
            metrics.ACTIVITY_SECONDS.inc(seconds, activity=name) for name, seconds in spent.items() if seconds
        ]

    def _charge(self, now: float) -> None:
        self._spent[self._current] += max(0.0, now - self._since)
        self._since = max(now, self._since)


def process_age_seconds() -> float:
    """How long this process has lived (Linux: proc(5)); 0.0 where that cannot be told."""
    try:
        with open("/proc/self/stat", encoding="ascii") as stat, open("/proc/uptime", encoding="ascii") as up:
            started = int(stat.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
            return max(0.0, float(up.read().split()[0]) - started)
    except (OSError, ValueError, IndexError):
        return 0.0


def resident_bytes(pid: int) -> int:
    """The memory that a process has in RAM (Linux: proc(5)); 0 where that cannot be told."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class Replays:
    """Counts steps done again after a restart, and those that a killed rank could not report."""

    def __init__(self, reached: int = 0) -> None:
        self._done = self._reached = reached
        self._redo_until = 0
        self._has_begun = False

    def begin(self, step: int) -> tuple[int, int]:
        """A generation begins at `step`: (steps of this launch never reported, those of them done again)."""
        unreported = max(0, step - self._done) if self._has_begun else 0
        again = self.advance(step) if unreported else 0
        self._has_begun = True
        self._done, self._redo_until = step, self._reached
        self._reached = max(self._reached, step)
        return unreported, again

    def advance(self, step: int) -> int:
        """`step` steps are done now; how many of the new ones had been done before."""
        again = max(0, min(step, self._redo_until) - self._done)
        self._done = max(self._done, step)
        self._reached = max(self._reached, step)
        return again


def volume_sizes(directory: Path) -> list[Sample]:
    """Free space and size of the volume; empty if it does not answer."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return []
    return [
        metrics.CHECKPOINT_VOLUME_AVAILABLE_BYTES.set(usage.free),
        metrics.CHECKPOINT_VOLUME_SIZE_BYTES.set(usage.total),
    ]


def signal_increments(received: Mapping[str, int], counted: dict[str, int]) -> list[Sample]:
    """Signals that came since `counted`, which is brought up to date."""
    new = {name: number - counted.get(name, 0) for name, number in received.items()}
    counted.update(received)
    return [metrics.SIGNALS_RECEIVED.inc(number, signal=name) for name, number in new.items() if number]


class CountingHandler(logging.Handler):
    """Counts log records of warning and above as `tandem_log_messages`."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._count = send

    def emit(self, record: logging.LogRecord) -> None:
        level = "critical" if record.levelno >= logging.CRITICAL else record.levelname.lower()
        if level in ("warning", "error", "critical"):
            self._count(Samples([metrics.LOG_MESSAGES.inc(level=level)]))


def count_log_messages(send: Send) -> None:
    """Count what the "tandem" logger says in this process; replaces an earlier counter."""
    logger = logging.getLogger("tandem")
    for old in [handler for handler in logger.handlers if isinstance(handler, CountingHandler)]:
        logger.removeHandler(old)
    logger.addHandler(CountingHandler(send))


class HealthFile:
    """health.json in a folder (None: nowhere), written again as soon as it can be; that it cannot is said
    once."""

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._has_failed = folder, False

    def write(self, record: Mapping[str, object]) -> None:
        """See `health.record`; call it once a second."""
        if self._folder is None:
            return
        try:
            health.write_health(self._folder, record)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write health to %s: %s; retrying", self._folder, error)
            self._has_failed = True
