"""Stop crash loops: count starts that have saved nothing new, in the run directory.

With too little memory, a platform starts a new pod every few seconds. A segmentation fault at the first step
exits with 200, which a platform restarts forever. Node 0 waits longer before each such start, and gives up
after --max-crash-loops.
"""

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass

from tandem import layout
from tandem.bounded_reader import STARTS, content, parsed, typed
from tandem.checkpoint.listing import newest_step
from tandem.checkpoint.storage import remote_at
from tandem.config.address import RemotePath
from tandem.errors import STOPPED, CrashLoopError
from tandem.log import printable
from tandem.run.directory import RunDir
from tandem.telemetry.journal import write_bytes_atomic
from tandem.timeouts import FIRST_BACKOFF_SECONDS, LONGEST_BACKOFF_SECONDS, MONITOR_SECONDS, STEADY_SECONDS

log = logging.getLogger("tandem.launch")

AT_ONCE = 2
"""Up to this many starts that save nothing new are normal: a node may be drained twice in a row."""


@dataclass(frozen=True)
class Record:
    """The content of the file: how many starts since `step` was saved, and why the last one ended."""

    starts: int = 0
    step: int = 0
    reason: str = ""

    @classmethod
    def parse(cls, raw: bytes | None) -> "Record":
        """Parse the file; an invalid record counts as none."""
        with suppress(ValueError):
            found = typed(parsed(raw or b"{}"), STARTS)[0]
            return cls(found["starts"], found["step"], printable(found["reason"], 1000))
        return cls()


def backoff_seconds(starts: int) -> float:
    """Return the wait after `starts` starts that have saved nothing new."""
    if starts <= AT_ONCE:
        return 0.0
    # math.pow raises OverflowError for an exponent of 1024; 16 doublings already exceed the longest wait.
    doublings = min(starts - AT_ONCE - 1, 16)
    return min(FIRST_BACKOFF_SECONDS * math.pow(2, doublings), LONGEST_BACKOFF_SECONDS)


class CrashLoop:
    """The starts of `run`, including this launch's. `is_ours` is checked before each write.

    `steady`: seconds after which a start is no crash. `backoff`: a function from the number of starts that
    saved nothing new to the wait.
    """

    def __init__(
        self,
        run: RunDir,
        is_ours: Callable[[], bool] = lambda: True,
        steady: float = STEADY_SECONDS,
        backoff: Callable[[int], float] = backoff_seconds,
    ) -> None:
        self._where = run.where
        self._folder = run.folder
        self._is_ours = is_ours
        self._backoff = backoff
        step = newest_step(run.checkpoints) or 0
        before = Record.parse(self._read())
        # A newer checkpoint than at the last count is progress, so the count begins again.
        self._before = before if step <= before.step else Record(step=step)
        self._timer = threading.Timer(steady, self._forget)
        # Without this, an exit that does not reach `end` would wait for the timer.
        self._timer.daemon = True

    def begin(self, allowed: int, should_stop: Callable[[], bool]) -> None:
        """Count this start, after waiting as long as the earlier ones require. Raises CrashLoopError."""
        before = self._before
        if before.starts >= allowed:
            self._forget()  # the next start is by a person who has read this error
            raise CrashLoopError(
                f"{before.starts} starts in a row have saved nothing new after step {before.step}; the last "
                f"one: {before.reason or 'it was killed'}. Check log/ in {self._where}, fix that and "
                "start again; --max-crash-loops sets how many starts are tried"
            )
        seconds = self._backoff(before.starts)
        if seconds:
            log.warning(
                "%d starts in a row have saved nothing new after step %d (%s): waiting %.0f s",
                before.starts, before.step, before.reason or "killed", seconds,
            )  # fmt: skip
        # Sleep in short intervals: a stop during the wait must not outlast the platform's grace period.
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not should_stop():
            time.sleep(MONITOR_SECONDS)
        # Write it before any rank starts, because a killed node cannot record its own end.
        self._write(Record(before.starts + 1, before.step))
        self._timer.start()

    def end(self, code: int, reason: str, generations: int) -> None:
        """Record how the launch ended.

        Only an end that the platform restarts counts, and only after ranks have started.
        """
        self._timer.cancel()
        if code < 128 or code == STOPPED:  # 255 as well: a platform restarts it
            self._forget()
        elif generations == 0:
            # No rank has run, so this start proves nothing about the program.
            self._write(self._before)
        else:
            self._write(Record(self._before.starts + 1, self._before.step, f"code {code}, {reason}"[:1000]))

    def _read(self) -> bytes | None:
        with suppress(OSError):
            if isinstance(self._where, RemotePath):
                return remote_at(self._where).read(self._where / layout.STARTS)
            return content(self._folder, layout.STARTS)
        return None

    def _write(self, record: Record) -> None:
        self._put((json.dumps(asdict(record)) + "\n").encode() if record.starts else None)

    def _forget(self) -> None:
        """Reset the count: this start is stable, or has ended for good."""
        self._before = Record(step=self._before.step)  # `end` counts from here
        self._put(None)

    def _put(self, record: bytes | None) -> None:
        # A launch that has lost the lease must not change the count of the new owner.
        if not self._is_ours():
            return
        try:
            if isinstance(self._where, RemotePath):
                store = remote_at(self._where)
                if record is None:
                    store.delete(self._where, [layout.STARTS])
                else:
                    store.write(self._where / layout.STARTS, record)
            elif record is None:
                (self._folder / layout.STARTS).unlink(missing_ok=True)
            else:
                write_bytes_atomic(self._folder / layout.STARTS, record)
        except OSError as error:
            # The count is only a safeguard, so a full volume must not keep the run from training.
            log.warning("cannot record this start in %s: %s", self._where, error)
