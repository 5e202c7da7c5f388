"""`--batch-shares` while a run trains: given ones stay, `auto` is decided once from the pace of some steps.

What was decided is a part of the state, so every resume of it has the same shares, and so the same bits.
"""

import logging
from collections.abc import Iterator, Sequence
from statistics import quantiles
from typing import Any

from tandem.data.fetch import Batch
from tandem.data.shares import equal_shares, fits, measured_shares
from tandem.data.source import Reader, TrainingData
from tandem.distributed.group import ProcessGroup
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import StepTimes
from tandem.telemetry.recorder import Recorder
from tandem.telemetry.stragglers import MARK_RATIO

log = logging.getLogger("tandem.run")

PACE_STEPS = 20
"""Steps with equal shares before `auto` decides."""
PACE_WARMUP = 5
"""The first of them, which do not count: caches, allocators and kernels settle."""


class BatchShares:
    """The batches of a run, and how much of each is whose; `sizes` is empty for equal shares."""

    def __init__(
        self, data: TrainingData, reader: Reader, world: ProcessGroup, clock: Clock, recorder: Recorder
    ) -> None:
        self._data, self._reader, self._world = data, reader, world
        self._clock, self._recorder = clock, recorder
        self._is_auto = reader.config.batch_shares == "auto" and world.size > 1
        self._due: int | None = None  # the step after which the ranks decide

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each rank in a global batch; empty for equal shares."""
        return self._reader.sizes

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The micro-batches of each step; where shares change the data are read anew, as after a resume."""
        if self._is_auto and not self.sizes:
            self._due = start + PACE_STEPS
            if self._due < stop:
                yield from self._data.steps(start, self._due)
                self._data.load(self._data.state())
                start = self._due
        yield from self._data.steps(start, stop)

    def after_step(self, step: int) -> None:
        """`step` steps are finished: all ranks decide here, if it is time. What is saved next holds it."""
        if step != self._due:
            return
        mine = pace(self._reader_size(), [*self._clock.recent][PACE_WARMUP:])
        paces = self._world.gather_json(mine)
        config = self._reader.config
        sizes = measured_shares(paces, MARK_RATIO, config.batch_size, config.micro_batch_size)
        self._reader.sizes = sizes
        self._recorder.event("batch_shares", step=step, sizes=sizes, samples_per_second=paces)
        if self._world.is_first:
            log.info(
                "batch shares after %d steps: %s of %d samples%s; the ranks process %s samples/s",
                step,
                ":".join(map(str, sizes)),
                config.batch_size,
                " (equal: no rank is much slower)" if sizes == self._equal() else "",
                ", ".join(f"{each:,.0f}" for each in paces),
            )

    def state(self) -> list[int]:
        """What `auto` has decided; as many zeros before, so that a snapshot's room is enough for it."""
        return list(self.sizes or [0] * self._world.size) if self._is_auto else []

    def load(self, state: Sequence[Any]) -> None:
        """Keep to what was decided, if it was for so many ranks and these micro-batches; else measure."""
        sizes, config = tuple(int(size) for size in state), self._reader.config
        if not self._is_auto or len(sizes) != self._world.size or min(sizes) < 1:
            return
        if sum(sizes) == config.batch_size and (
            fits(sizes, config.micro_batch_size) or sizes == self._equal()
        ):
            self._reader.sizes = sizes

    def _equal(self) -> tuple[int, ...]:
        return equal_shares(self._reader.config.batch_size, self._world.size)

    def _reader_size(self) -> int:
        return (self.sizes or self._equal())[self._world.rank]


def pace(samples: int, steps: Sequence[StepTimes]) -> float:
    """Samples per second of a rank's own work that grows with its share, in its quicker steps.

    The lower quartile, because a busy neighbour slows some steps and a slow device all. The optimizer and
    what is between steps last equally long whatever the share, and the wait is for others.
    """
    own = [step.data + step.transfer + step.forward + step.backward for step in steps]
    return samples / max(quantiles(own, n=4, method="inclusive")[0], 1e-9)
