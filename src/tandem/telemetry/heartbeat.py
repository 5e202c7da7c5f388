"""What a rank says of itself four times a second, from a thread beside the training.

Where it is (step, activity, phase), since when, and whether it waits for others there: read from the
clock that the training thread tells. Nothing here touches a collective; of a GPU on which the host seems to
wait, events are asked whether they have passed, which waits for nothing.
"""

import faulthandler
import logging
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

from tandem.config.slices import ReliabilityConfig
from tandem.log import renew_outputs
from tandem.rotation import LOG_BYTES, put_aside
from tandem.telemetry.clock import STEP_PHASES, Clock
from tandem.telemetry.messages import Heartbeat, Send
from tandem.timeouts import BEAT_SECONDS, SHORTEST_HANG_SECONDS, STARTING_HANG_SECONDS
from tandem.torch_private import flight_record

log = logging.getLogger("tandem.heartbeat")

BUSY_SHARE = 0.5  # of a core, over the last second
STEPS_PER_HANG = 5
DUMP_SIGNAL = signal.SIGUSR1


class Heartbeats:
    """One rank's signs of life, as `limits` say how long something may take.

    `--hang-timeout auto` is five of the longest steps, at least 10 seconds. A rank that is stuck for a hang's
    time writes torch's flight recorder to `directory`.
    """

    def __init__(
        self, rank: int, clock: Clock, send: Send, limits: ReliabilityConfig, directory: Path
    ) -> None:
        self._rank, self._clock, self._send = rank, clock, send
        self._hang_timeout, self._patience = limits.hang_seconds, limits.first_step_timeout
        self._path = directory / f"flight-rank-{rank}.json"
        self._trainer = threading.main_thread().ident or 0
        self._cpu: list[tuple[float, float]] = []
        self._one_at_a_time = threading.Lock()
        self._recorded, self._complained = -1, False
        clock.on_activity = self.send
        threading.Thread(target=self._beat, name="tandem-heartbeat", daemon=True).start()

    def hang_seconds(self) -> float:
        """How long a training phase may take, and how long a rank may say nothing."""
        if self._hang_timeout is not None:
            return self._hang_timeout
        if not self._clock.has_trained:  # imports and compilation may starve whoever speaks
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * self._clock.longest_step)

    def send(self) -> None:
        """Say where the rank is now; in this order, whichever thread says it."""
        with self._one_at_a_time:
            clock, quiet = self._clock, time.monotonic() - self._clock.since
            trains = clock.current in STEP_PHASES and clock.has_trained
            stands = quiet > 2 * BEAT_SECONDS
            kernel = clock.kernel() if stands and trains else None
            phase, step = clock.current, clock.step
            if kernel is not None:  # the host waits for it further on, as it would for other ranks
                phase, step = f"{kernel[0]} (kernel)", kernel[1]
            self._send(
                Heartbeat(
                    rank=self._rank,
                    step=step,
                    activity=clock.activity,
                    phase=phase,
                    quiet=round(quiet, 3),
                    limit=self.hang_seconds() if trains else self._patience,
                    hang=self.hang_seconds(),
                    trained=clock.has_trained,
                    waiting=stands and kernel is None and self._waits(),
                )
            )

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            try:
                self._cpu = [*self._cpu[-4:], (time.monotonic(), time.process_time())]
                self.send()
                renew_outputs()
                self._record_if_stuck()
            except Exception:  # a rank that nobody speaks for is taken for one that hangs
                if not self._complained:
                    log.exception("a sign of life failed; the next one comes all the same")
                self._complained = True

    def _record_if_stuck(self) -> None:
        stuck = time.monotonic() - self._clock.since > self.hang_seconds()
        if stuck and self._recorded != self._clock.entered:
            self._recorded = self._clock.entered
            with suppress(OSError):
                self._path.write_bytes(flight_record())

    def _waits(self) -> bool:
        """Whether the training thread stands in a collective: known from its stack, or an idle backward."""
        frame = sys._current_frames().get(self._trainer)
        if _in_distributed(frame):
            return True
        if not self._clock.is_of_host:  # kernels are awaited where their results are
            return self._clock.current in ("backward", "optimizer")
        return self._clock.current == "backward" and not self._busy()

    def _busy(self) -> bool:
        (then, cpu_then), (now, cpu_now) = self._cpu[0], self._cpu[-1]
        return now > then and (cpu_now - cpu_then) / (now - then) > BUSY_SHARE


def _in_distributed(frame: FrameType | None) -> bool:
    while frame is not None:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def dump_stacks_on_request(directory: Path, rank: int) -> None:
    """Make SIGUSR1 write the stacks of all threads to DIRECTORY/stacks-rank-N.txt, whatever they stand in."""
    path = directory / f"stacks-rank-{rank}.txt"
    put_aside(path, LOG_BYTES)
    try:
        file = path.open("a")
    except OSError as error:  # a worker needs no volume
        log.debug("no stacks will be written: %s", error)
        return
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
