"""Iterate over a run's batches: do the work before and after each step, and at the end of the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tandem.custom_loop.backward import Backward
from tandem.data.loader import batch_size_of, parts_of
from tandem.data.seeds import seed_micro_step
from tandem.errors import STOPPED, ConfigError
from tandem.signals import StopFlag
from tandem.training.loop import LoopState, after_step

# Split a batch into several backward passes whose gradients add up to those of the whole batch.


class MicroBatches:
    """Track the part of the batch that the script is processing.

    `share` is this rank's number of samples relative to an equal share.
    """

    def __init__(self, seed: int, rank: int, backward: Backward) -> None:
        self._seed = seed
        self._rank = rank
        self._backward = backward
        self.share = 1.0
        self._part_of_batch = 1.0
        self.is_last = True

    @property
    def weight(self) -> float:
        """The weight of the next loss, which makes the mean over ranks the mean over all samples."""
        return self.share * self._part_of_batch

    def of(self, batch: Any, count: int, step: int) -> Iterator[Any]:
        """Yield the parts. Raises ConfigError if `batch` has fewer than `count` samples."""
        size = batch_size_of(batch)
        if not 1 <= count <= size:
            raise ConfigError(
                f"run.parts(batch, {count}): invalid value {count}; expected 1 to {size}, "
                "the samples of the batch"
            )
        try:
            sizes = [size // count + (number < size % count) for number in range(count)]
            for number, part in enumerate(parts_of(batch, sizes)):
                self._part_of_batch = sizes[number] / size
                self.is_last = number == count - 1
                self._backward.set_gradient_sync(self.is_last)
                seed_micro_step(self._seed, step, number, self._rank)
                yield part
        finally:
            # The script may leave its loop over the parts early, and its next backward pass is for a whole
            # batch.
            self._part_of_batch = 1.0
            self.is_last = True
            self._backward.set_gradient_sync(True)


@dataclass
class Batches(Iterator[Any]):
    """Yield each step's batch; when asked for the next one, finish the previous step.

    `finish(finished)` ends the run. Raises SystemExit after a stop signal, so that the script's lines after
    the loop run only after a complete run.
    """

    loop_state: LoopState
    backward: Backward
    data: Iterator[list[Any]]
    stop: StopFlag
    seed: int
    optimizers: list[torch.optim.Optimizer]
    finish: Callable[[bool], None]
    first: int
    is_open: bool = False
    is_over: bool = False

    def __next__(self) -> Any:
        loop_state = self.loop_state
        planned = self.loop_state.event_schedule.steps_planned
        # The script has finished with a batch when it asks for the next one.
        if self.is_open:
            self.is_open = False
            if self._end_step():
                self._end(finished=False)
                raise SystemExit(STOPPED)
        if loop_state.step >= planned or self.backward.ends:
            # A script may call an iterator again after its end, but a run ends once.
            if not self.is_over:
                self._end(finished=True)
            raise StopIteration
        loop_state.clock.begin_step()
        # The reader makes no micro-batches here (see `Engine._reader`).
        (batch,) = next(self.data)
        loop_state.clock.enter("transfer")
        seed_micro_step(self.seed, loop_state.step, 0, loop_state.world.rank)
        decisions = loop_state.event_schedule.decisions(loop_state.world.is_first)
        self.backward.begin_step(loop_state.step, bool(self.stop), decisions)
        loop_state.clock.enter("forward")
        self.is_open = True
        return batch

    def _end_step(self) -> bool:
        """Finish the step; return whether a signal ends the run."""
        loop_state = self.loop_state
        consensus = self.backward.end_step()
        rate = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        # A save contains the log's sums, which all ranks must reduce first.
        if "save" in loop_state.event_schedule.due(loop_state.step + 1, consensus):
            self.backward.flush()
        return after_step(loop_state, consensus, rate, is_first=loop_state.step == self.first)

    def _end(self, finished: bool) -> None:
        self.is_over = True
        self.finish(finished)
        if finished:  # otherwise the process exits, and a second Ctrl-C may still need to end it
            self.stop.uninstall()
