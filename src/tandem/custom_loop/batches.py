"""Iterate over a run's batches: what precedes a step, what follows it, and the end of the run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tandem.custom_loop.backward import Backward
from tandem.data.seeds import seed_micro_step
from tandem.errors import STOPPED
from tandem.signals import StopFlag
from tandem.training.loop import LoopState, after_step


@dataclass
class Batches(Iterator[Any]):
    """Yield each step's batch; when asked for the next one, finish the previous step.

    `finish(finished)` ends the run. Raises SystemExit after a stop signal, so that the script's lines after
    the loop run only after a complete run.
    """

    course: LoopState
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
        course = self.course
        planned = self.course.timetable.steps_planned
        # The script has finished with a batch when it asks for the next one.
        if self.is_open:
            self.is_open = False
            if self._end_step():
                self._end(finished=False)
                raise SystemExit(STOPPED)
        if course.step >= planned or self.backward.ends:
            # An iterator can be asked again after its end, but a run ends once.
            if not self.is_over:
                self._end(finished=True)
            raise StopIteration
        course.clock.begin_step()
        # The reader makes no micro-batches here (see `Engine._reader`).
        (batch,) = next(self.data)
        course.clock.enter("transfer")
        seed_micro_step(self.seed, course.step, 0, course.world.rank)
        decisions = course.timetable.decisions(course.world.is_first)
        self.backward.begin_step(course.step, bool(self.stop), decisions)
        course.clock.enter("forward")
        self.is_open = True
        return batch

    def _end_step(self) -> bool:
        """Finish the step; return whether a signal ends the run."""
        course = self.course
        consensus = self.backward.end_step()
        rate = float(self.optimizers[0].param_groups[0]["lr"]) if self.optimizers else 0.0
        # A save contains the log's sums, which all ranks have to reduce first.
        if "save" in course.timetable.due(course.step + 1, consensus):
            self.backward.flush()
        return after_step(course, consensus, rate, is_first=course.step == self.first)

    def _end(self, finished: bool) -> None:
        self.is_over = True
        self.finish(finished)
        if finished:  # otherwise the process exits, and a second Ctrl-C may still have to end it
            self.stop.uninstall()
