"""Heartbeats of a rank, four times a second from a separate thread.

A heartbeat has the position (step, activity, phase), since when, and whether the rank waits for others there.
It is read from the clock that the training thread updates, and never from a collective. If the host seems to
wait for a GPU, events are queried without blocking.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from tandem import layout, running
from tandem.config.slices import ReliabilityConfig
from tandem.log import renew_outputs
from tandem.telemetry.clock import STEP_PHASES, Clock
from tandem.telemetry.effort import Effort, in_collective
from tandem.telemetry.limits import Limits
from tandem.telemetry.messages import Heartbeat, Send
from tandem.timeouts import BEAT_SECONDS
from tandem.torch_private import flight_record

log = logging.getLogger("tandem.heartbeat")


class Heartbeats:
    """Sends the heartbeats of one rank, with the time limits from `limits`.

    A rank that is stuck for as long as a hang writes torch's flight recorder to `directory`.
    """

    def __init__(
        self, rank: int, clock: Clock, send: Send, limits: ReliabilityConfig, directory: Path
    ) -> None:
        self._rank, self._clock, self._send = rank, clock, send
        self._limits = Limits(limits.hang_seconds, limits.phase_timeout)
        self._path = directory / layout.flight(rank)
        self._effort = Effort()
        self._one_at_a_time = threading.Lock()
        self._recorded, self._complained = -1, False
        clock.on_activity = self.send
        threading.Thread(target=self._beat, name="tandem-heartbeat", daemon=True).start()

    def send(self) -> None:
        """Send the rank's position; the lock keeps the order, whichever thread calls."""
        with self._one_at_a_time:
            clock, now = self._clock, running.now()
            quiet = now - clock.since
            trains = clock.current in STEP_PHASES and clock.has_trained
            stands = quiet > 2 * BEAT_SECONDS
            kernel = clock.kernel() if stands and trains else None
            phase, step = clock.current, clock.step
            # The host waits for the kernel later in the step, in a place where it also waits for other ranks.
            if kernel is not None:
                phase, step = f"{kernel[0]} (kernel)", kernel[1]
            idle = quiet if kernel is not None else min(quiet, max(0.0, now - self._effort.worked_at))
            limits = self._limits
            self._send(
                Heartbeat(
                    rank=self._rank,
                    step=step,
                    activity=clock.activity,
                    phase=phase,
                    quiet=round(quiet, 3),
                    limit=limits.of_work(trains),
                    hang=self._hang_seconds(),
                    trained=clock.has_trained,
                    waiting=stands and kernel is None and self._waits(),
                    idle=round(idle, 3),
                    idle_limit=limits.of_idling(clock.longest_step) if trains else limits.patience,
                )
            )

    def _hang_seconds(self) -> float:
        return self._limits.of_silence(self._clock.typical_step if self._clock.has_trained else None)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self._effort.look(by_cpu_time=self._clock.is_of_host)
                self.send()
                renew_outputs()
                self._record_if_stuck()
            except Exception:  # a rank without heartbeats would be reported as hung
                if not self._complained:
                    log.exception("sending a heartbeat failed; will keep trying")
                self._complained = True

    def _record_if_stuck(self) -> None:
        stuck = running.now() - self._clock.since > self._hang_seconds()
        if stuck and self._recorded != self._clock.entered:
            self._recorded = self._clock.entered
            with suppress(OSError):
                self._path.write_bytes(flight_record())

    def _waits(self) -> bool:
        """Return True if the training thread waits for others: in a collective, or in an idle backward."""
        frame = self._effort.frame
        if in_collective(frame):
            return True
        if not self._clock.is_of_host:  # the host waits for kernels where it uses their results
            return self._clock.current in ("backward", "optimizer")
        is_in_torch = frame is not None and "/torch/" in frame.f_code.co_filename
        return self._clock.current == "backward" and is_in_torch and not self._effort.is_busy()
