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

from tandem import layout, running_clock
from tandem.config.slices import ReliabilityConfig
from tandem.log import renew_outputs
from tandem.telemetry.clock import STEP_PHASES, Clock
from tandem.telemetry.hangs import HangLimits
from tandem.telemetry.messages import Heartbeat, Send
from tandem.telemetry.thread_activity import ThreadActivity, in_collective
from tandem.timeouts import BEAT_SECONDS
from tandem.torch_private import flight_record

log = logging.getLogger("tandem.heartbeat")


class Heartbeats:
    """Sends the heartbeats of one rank, with the time limits from `limits`.

    One is sent every `pause` seconds. A rank that is stuck for as long as a hang writes torch's flight
    recorder to `directory`.
    """

    def __init__(
        self,
        rank: int,
        clock: Clock,
        send: Send,
        limits: ReliabilityConfig,
        directory: Path,
        pause: float = BEAT_SECONDS,
    ) -> None:
        self._rank = rank
        self._clock = clock
        self._send = send
        self._pause = pause
        self._limits = HangLimits(limits.hang_seconds, limits.phase_timeout)
        self._path = directory / layout.flight(rank)
        self._effort = ThreadActivity()
        self._one_at_a_time = threading.Lock()
        self._recorded = -1
        self._complained = False
        clock.on_activity = self.send
        threading.Thread(target=self._beat, name="tandem-heartbeat", daemon=True).start()

    def send(self) -> None:
        """Send the rank's position; the lock keeps the order, whichever thread calls."""
        with self._one_at_a_time:
            clock = self._clock
            now = running_clock.now()
            quiet = now - clock.since
            trains = clock.current in STEP_PHASES and clock.has_trained
            # Most phases are shorter, so the stack and the events are examined only after two heartbeats.
            stands = quiet > 2 * self._pause
            kernel = clock.kernel() if stands and trains else None
            phase = clock.current
            step = clock.step
            # The host waits for the kernel later in the step, in a place where it also waits for other ranks.
            if kernel is not None:
                phase = f"{kernel[0]} (kernel)"
                step = kernel[1]
            # Work of the host, such as its loaders', says nothing about a kernel, so all of the time counts.
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
            time.sleep(self._pause)
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
        stuck = running_clock.now() - self._clock.since > self._hang_seconds()
        # Once for each phase that is stuck, because the record does not change while the rank waits.
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
        # gloo's wait for gradients has no Python frame, and takes no CPU time.
        return self._clock.current == "backward" and is_in_torch and not self._effort.is_busy()
