"""Locate a rank by the clock that its training thread updates: the position of tandem's own loops.

If the host seems to wait for a GPU, events are queried without blocking.
"""

from contextlib import suppress
from pathlib import Path

from tandem.telemetry.clock import STEP_PHASES, Clock
from tandem.telemetry.heartbeat import LOCATED_SECONDS, Location
from tandem.telemetry.messages import Heartbeat
from tandem.telemetry.thread_activity import ThreadActivity, in_collective
from tandem.torch_private import flight_record


class ClockLocator:
    """Locate a rank by its clock; if it hangs, write torch's flight recorder to `path`."""

    def __init__(self, clock: Clock, path: Path) -> None:
        self._clock = clock
        self._path = path
        self._recorded = -1

    @property
    def cpu_time_shows_progress(self) -> bool:
        """See `Clock`."""
        return self._clock.cpu_time_shows_progress

    def locate(self, now: float, thread: ThreadActivity) -> Location:
        """Return the location at `now`."""
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
