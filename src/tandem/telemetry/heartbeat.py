"""What a rank says of itself four times a second, from a thread beside the training.

Where it is (step, phase), since when, and whether it waits for others there. The training thread only
writes three fields when it enters a phase; nothing here touches a collective or a GPU.
"""

import faulthandler
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from tandem.distributed.group import Position
from tandem.timeouts import BEAT_SECONDS, SHORTEST_HANG_SECONDS, STARTING_HANG_SECONDS
from tandem.torch_private import flight_record

log = logging.getLogger("tandem.pulse")

BUSY_SHARE = 0.5  # of a core, over the last second
RECENT_STEPS = 50
STEPS_PER_HANG = 5
DUMP_SIGNAL = signal.SIGUSR1

Send = Callable[[Mapping[str, object]], object]


class Pulse:
    """One rank's sign of life. `hang_timeout` in seconds; None: five of the longest steps, at least 10.

    `patience` is the limit in seconds of what may take long: start, first step, evaluation, saves.
    A rank that is stuck for a hang's time writes torch's flight recorder to `directory`.
    """

    def __init__(
        self,
        position: Position,
        send: Send,
        hang_timeout: float | None,
        patience: float,
        on_cpu: bool,
        directory: Path,
    ) -> None:
        self._position, self._send, self._directory = position, send, directory
        self._hang_timeout, self._patience, self._on_cpu = hang_timeout, patience, on_cpu
        self._phase, self._step, self._since, self._marks = "startup", 0, time.monotonic(), 0
        self._first_step: int | None = None
        self._step_began = self._since
        self._durations: list[float] = []
        self._trainer = threading.main_thread().ident or 0
        self._cpu: list[tuple[float, float]] = []
        self._closing = threading.Event()
        threading.Thread(target=self._beat, name="tandem-pulse", daemon=True).start()

    def enter(self, phase: str) -> None:
        """The training thread begins something else."""
        self._phase, self._since = phase, time.monotonic()
        self._marks += 1

    def begin_step(self, step: int) -> None:
        """`step` steps are finished and the next one begins with its data."""
        now = time.monotonic()
        if self._first_step is None:
            self._first_step = step
        else:
            self._durations = [*self._durations[1 - RECENT_STEPS :], now - self._step_began]
        self._step, self._step_began = step, now
        self.enter("data")

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Something between two steps; what it takes is no part of a step."""
        self.enter(phase)
        try:
            yield
        finally:
            self.enter("between")
            self._step_began = self._since

    def close(self) -> None:
        self._closing.set()

    def hang_seconds(self) -> float:
        """How long a training phase may take, and how long a rank may say nothing."""
        if self._hang_timeout is not None:
            return self._hang_timeout
        if not self._has_trained():  # imports and compilation may starve whoever speaks
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * max(self._durations, default=0.0))

    def _limit(self) -> float:
        training = self._phase in ("data", "forward", "backward", "optimizer", "between")
        return self.hang_seconds() if training and self._has_trained() else self._patience

    def _has_trained(self) -> bool:
        return self._first_step is not None and self._step > self._first_step

    def _beat(self) -> None:
        recorded = -1
        while not self._closing.wait(BEAT_SECONDS):
            self._cpu = [*self._cpu[-4:], (time.monotonic(), time.process_time())]
            quiet = time.monotonic() - self._since
            pulse: dict[str, object] = {
                "rank": self._position.rank,
                "step": self._step,
                "phase": self._phase,
                "quiet": round(quiet, 3),
                "limit": self._limit(),
                "hang": self.hang_seconds(),
                "trained": self._has_trained(),
                "waiting": quiet > 2 * BEAT_SECONDS and self._waits(),
            }
            self._send({"pulse": pulse})
            if quiet > self.hang_seconds() and recorded != self._marks:
                recorded = self._marks
                self._write_flight_record()

    def _write_flight_record(self) -> None:
        with suppress(OSError):
            (self._directory / f"flight-rank-{self._position.rank}.json").write_bytes(flight_record())

    def _waits(self) -> bool:
        """Whether the training thread stands in a collective: known from its stack, or an idle backward."""
        frame = sys._current_frames().get(self._trainer)
        if _in_distributed(frame):
            return True
        if not self._on_cpu:  # kernels are awaited where their results are
            return self._phase in ("backward", "optimizer")
        return self._phase == "backward" and not self._busy()

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
    try:
        file = (directory / f"stacks-rank-{rank}.txt").open("a")
    except OSError as error:  # a worker needs no volume
        log.debug("no stacks will be written: %s", error)
        return
    faulthandler.register(DUMP_SIGNAL, file=file, all_threads=True)
