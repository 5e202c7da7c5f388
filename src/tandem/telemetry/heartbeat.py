"""Heartbeats of a rank, four times a second from a separate thread.

A heartbeat has the rank's position (step, activity, phase), when it got there, and whether it waits for
others. A `Locator` knows the position: `ClockLocator` from the clock of tandem's own loops,
`script/observer.py` from the stack of a script. Neither uses a collective or waits for a device. See
docs/architecture.md#hangs.
"""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem import running_clock
from tandem.log import renew_outputs
from tandem.telemetry.clock import STEP_PHASES, Clock
from tandem.telemetry.hangs import HangLimits
from tandem.telemetry.messages import Heartbeat, Send
from tandem.telemetry.thread_activity import ThreadActivity, in_collective
from tandem.timeouts import BEAT_SECONDS
from tandem.torch_private import flight_record

log = logging.getLogger("tandem.heartbeat")

LOCATED_SECONDS = 2 * BEAT_SECONDS
"""Time in one place after which a rank is checked for a wait: most phases are shorter."""


@dataclass(frozen=True)
class Location:
    """A rank's position, its start (`running_clock.now`), and the steps that set its time limits.

    `is_kernel`: a GPU computes there, so work of the host proves nothing. `has_step_limit`: the limits for
    steps apply, and `has_idle_limit`, that for a step without work. `own`, `quick` and `doing`: see
    `Heartbeat`.
    """

    step: int
    activity: str
    phase: str
    since: float
    is_waiting: bool
    has_trained: bool
    has_step_limit: bool
    has_idle_limit: bool
    typical_step: float = 0.0
    longest_step: float = 0.0
    is_kernel: bool = False
    own: float | None = None
    quick: float | None = None
    doing: str | None = None


class Locator(Protocol):
    """Locates a rank; `Heartbeats` calls it from its own thread, and at each new activity from the rank's."""

    @property
    def cpu_time_shows_progress(self) -> bool:
        """Whether CPU time shows work; False if the thread may wait for a GPU in a loop."""
        ...

    def locate(self, now: float, thread: ThreadActivity) -> Location:
        """Return the location at `now`; `thread` observes the training thread."""
        ...

    def beat(self, sent: Heartbeat) -> None:
        """Do whatever else is due after each heartbeat of the thread."""
        ...


class Heartbeats:
    """Sends the heartbeats of one rank from construction on, one every `pause` seconds."""

    def __init__(
        self, rank: int, locator: Locator, send: Send, limits: HangLimits, pause: float = BEAT_SECONDS
    ) -> None:
        self._rank = rank
        self._locator = locator
        self._send = send
        self._limits = limits
        self._pause = pause
        self._thread = ThreadActivity()
        self._one_at_a_time = threading.Lock()
        self._is_over = False
        self._complained = False
        threading.Thread(target=self._beat, name="tandem-heartbeat", daemon=True).start()

    def send(self) -> Heartbeat:
        """Send the rank's position, and return it; the lock keeps the order, whichever thread calls."""
        with self._one_at_a_time:
            now = running_clock.now()
            at = self._locator.locate(now, self._thread)
            quiet = now - at.since
            # Work of the host, such as its loaders', proves nothing about a kernel, so all of the time counts
            # as idle.
            idle = quiet if at.is_kernel else min(quiet, max(0.0, now - self._thread.worked_at))
            limits = self._limits
            heartbeat = Heartbeat(
                rank=self._rank,
                step=at.step,
                activity=at.activity,
                phase=at.phase,
                quiet=round(quiet, 3),
                limit=limits.phase_limit(at.has_step_limit),
                hang=limits.silence_limit(at.typical_step if at.has_trained else None),
                trained=at.has_trained,
                waiting=at.is_waiting,
                idle=round(idle, 3),
                idle_limit=limits.idle_limit(at.longest_step) if at.has_idle_limit else limits.patience,
                own=at.own,
                quick=at.quick,
                doing=at.doing,
            )
            self._send(heartbeat)
            return heartbeat

    def end(self) -> None:
        """Stop sending; from now on the rank reports its position in another way."""
        self._is_over = True

    def _beat(self) -> None:
        while not self._is_over:
            try:
                self._thread.look(by_cpu_time=self._locator.cpu_time_shows_progress)
                sent = self.send()
                renew_outputs()
                self._locator.beat(sent)
            except Exception:  # a rank without heartbeats would be reported as hung
                if not self._complained:
                    log.exception("sending a heartbeat failed; will keep trying")
                self._complained = True
            time.sleep(self._pause)


class ClockLocator:
    """Locate a rank by the clock of its training thread; if it hangs, write the flight recorder to `path`.

    If the host seems to wait for a GPU, events are queried without blocking.
    """

    def __init__(self, clock: Clock, path: Path) -> None:
        self._clock = clock
        self._path = path
        self._recorded = -1

    @property
    def cpu_time_shows_progress(self) -> bool:
        return self._clock.cpu_time_shows_progress

    def locate(self, now: float, thread: ThreadActivity) -> Location:
        clock = self._clock
        trains = clock.current in STEP_PHASES and clock.has_trained
        stands = now - clock.since > LOCATED_SECONDS
        kernel = clock.kernel() if stands and trains else None
        phase = clock.current
        step = clock.step
        # The host waits for the kernel later in the step, where it also waits for other ranks.
        if kernel is not None:
            phase = f"{kernel[0]} (kernel)"
            step = kernel[1]
        return Location(
            step=step,
            activity=clock.activity,
            phase=phase,
            since=clock.since,
            is_waiting=stands and kernel is None and self._waits(thread),
            has_trained=clock.has_trained,
            has_step_limit=trains,
            has_idle_limit=trains,
            typical_step=clock.typical_step if clock.has_trained else 0.0,
            longest_step=clock.longest_step,
            is_kernel=kernel is not None,
        )

    def beat(self, sent: Heartbeat) -> None:
        """Write the flight recorder once the rank is stuck."""
        # Write it once per stuck phase, because the record does not change while the rank waits.
        if sent.quiet > sent.hang and self._recorded != self._clock.entered:
            self._recorded = self._clock.entered
            with suppress(OSError):
                self._path.write_bytes(flight_record())

    def _waits(self, thread: ThreadActivity) -> bool:
        """Return True if the training thread waits for others: in a collective, or in an idle backward."""
        frame = thread.frame
        if in_collective(frame):
            return True
        if not self._clock.cpu_time_shows_progress:  # the host waits for kernels where it uses their results
            return self._clock.current in ("backward", "optimizer")
        is_in_torch = frame is not None and "/torch/" in frame.f_code.co_filename
        # gloo's wait for gradients has no Python frame, and takes no CPU time.
        return self._clock.current == "backward" and is_in_torch and not thread.is_busy()
