"""Keep what must outlive ranks, in the agent: activities, replays, signals, health."""

import logging
import os
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tandem.process import stat_of
from tandem.telemetry import health, metrics
from tandem.telemetry.messages import Samples, Send
from tandem.telemetry.meter import ACTIVITIES, ActivityClock
from tandem.telemetry.metrics import Sample

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
"""The state of the run while rank 0 is in an activity."""
ACTIVITY_OF = {state: activity for activity, state in STATE_OF.items()} | dict.fromkeys(
    metrics.FINAL_STATES, "drain"
)


class Activities:
    """Counts the wall time of each activity for the metrics. Thread-safe."""

    def __init__(self, now: float) -> None:
        self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        self._clock = ActivityClock(now)
        self._lock = threading.Lock()

    def enter(self, state: str, now: float) -> None:
        """Charge time from `now` on to this state of the run."""
        with self._lock:
            self._charge(now)
            self._clock.activity = ACTIVITY_OF[state]

    def take(self, now: float) -> list[Sample]:
        """Return the time spent since the last call, by activity."""
        with self._lock:
            self._charge(now)
            spent = self._spent
            self._spent = dict.fromkeys(ACTIVITIES, 0.0)
        return [
            metrics.ACTIVITY_SECONDS.inc(seconds, activity=name) for name, seconds in spent.items() if seconds
        ]

    def _charge(self, now: float) -> None:
        self._spent[self._clock.activity] += self._clock.charge(now)


def process_age_seconds() -> float:
    """Return the age of this process (Linux: proc(5)); 0.0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        started = int(stat_of(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in clock ticks
        return max(0.0, float(Path("/proc/uptime").read_text().split()[0]) - started)
    return 0.0


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process (Linux: proc(5)); 0 if unknown."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


class Replays:
    """Counts steps that are repeated after a restart, and steps that a killed rank could not report."""

    def __init__(self, reached: int = 0) -> None:
        self._done = self._reached = reached
        self._redo_until = 0
        self._has_begun = False

    def begin(self, step: int) -> tuple[int, int]:
        """Begin a generation at `step`; return (unreported steps of this launch, how many were repeats)."""
        # The first generation continues after steps of an earlier launch, which that launch has counted.
        unreported = max(0, step - self._done) if self._has_begun else 0
        again = self.advance(step) if unreported else 0
        self._has_begun = True
        self._done = step
        self._redo_until = self._reached
        self._reached = max(self._reached, step)
        return unreported, again

    def advance(self, step: int) -> int:
        """Record `step` finished steps; return how many of the new ones are repeats."""
        again = max(0, min(step, self._redo_until) - self._done)
        self._done = max(self._done, step)
        self._reached = max(self._reached, step)
        return again


def volume_sizes(directory: Path) -> list[Sample]:
    """Return the free space and size of the volume; empty if it does not answer."""
    try:
        usage = shutil.disk_usage(directory)
    except OSError:
        return []
    return [
        metrics.CHECKPOINT_VOLUME_AVAILABLE_BYTES.set(usage.free),
        metrics.CHECKPOINT_VOLUME_SIZE_BYTES.set(usage.total),
    ]


def signal_increments(received: Mapping[str, int], counted: dict[str, int]) -> list[Sample]:
    """Return the signals received since `counted`, and update `counted`."""
    new = {name: number - counted.get(name, 0) for name, number in received.items()}
    counted.update(received)
    return [metrics.SIGNALS_RECEIVED.inc(number, signal=name) for name, number in new.items() if number]


class CountingHandler(logging.Handler):
    """Counts log records of level warning and above as `tandem_log_messages`."""

    def __init__(self, send: Send) -> None:
        super().__init__(logging.WARNING)
        self._count = send

    def emit(self, record: logging.LogRecord) -> None:
        level = "critical" if record.levelno >= logging.CRITICAL else record.levelname.lower()
        # The label has only these values, and a library may define levels in between.
        if level in ("warning", "error", "critical"):
            self._count(Samples([metrics.LOG_MESSAGES.inc(level=level)]))


def count_log_messages(send: Send) -> None:
    """Count the records of the "tandem" logger in this process; replaces an earlier counter."""
    logger = logging.getLogger("tandem")
    for old in [handler for handler in logger.handlers if isinstance(handler, CountingHandler)]:
        logger.removeHandler(old)
    logger.addHandler(CountingHandler(send))


class HealthFile:
    """The file health.json in a directory (None: nowhere).

    A failed write is logged once, and the next write is attempted as usual.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._has_failed = False

    def write(self, record: Mapping[str, object]) -> None:
        """Write a record (see `health.record`); call it once a second."""
        if self._folder is None:
            return
        try:
            health.write_health(self._folder, record)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                log.warning("cannot write health to %s: %s; retrying", self._folder, error)
            self._has_failed = True
