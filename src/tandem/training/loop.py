"""The loop: everything that happens to a run, in order, on one screen."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.config import Settings
from tandem.distributed.consensus import Agreed
from tandem.distributed.group import ProcessGroup
from tandem.schedule import Cadence
from tandem.signals import StopFlag
from tandem.telemetry.clock import Clock
from tandem.telemetry.recorder import Recorder
from tandem.training.nonfinite import Policy
from tandem.training.optim import Schedule
from tandem.training.saving import Saver
from tandem.training.step import Proposal, Stepper

EVENTS = ("log", "eval", "save", "check", "snapshot")


@dataclass
class Timetable:
    """When each of EVENTS is due: by step number on every rank alike, by rank 0's clock for seconds.

    What the clock says travels as a bit inside the step's all-reduce, so that all ranks act together.
    """

    cadences: dict[str, Cadence]
    steps_per_epoch: int
    steps_planned: int
    clock: Callable[[], float] = time.monotonic
    _last: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, snapshot: Cadence, steps_per_epoch: int, planned: int) -> "Timetable":
        """The cadences of the settings; `snapshot` depends on the device as well."""
        cadences = {
            "log": Cadence.parse(settings.telemetry.log_every),
            "eval": Cadence.parse(settings.evaluation.eval_every),
            "save": Cadence.parse(settings.checkpoint.checkpoint_every),
            "check": Cadence.parse(settings.reliability.replica_check_every),
            "snapshot": snapshot,
        }
        return cls(cadences, steps_per_epoch, planned)

    def decisions(self, is_first: bool) -> int:
        """Rank 0's bits for this step; nothing from the others."""
        if not is_first:
            return 0
        now = self.clock()
        bits = 0
        for position, event in enumerate(EVENTS):
            if self.cadences[event].is_due_by_time(now - self._last.setdefault(event, now)):
                self._last[event] = now
                bits |= 1 << position
        return bits

    def due(self, step: int, agreed: Agreed | None) -> set[str]:
        """The events that happen after `step` finished steps; a stop that was agreed on means a save."""
        due = {event for event in EVENTS if self.is_due(event, step, agreed)}
        return due | {"save"} if agreed is not None and agreed.stop else due

    def is_due(self, event: str, step: int, agreed: Agreed | None) -> bool:
        """Whether `event` happens after `step` finished steps; the last step counts for all of them."""
        by_clock = agreed is not None and bool(agreed.decisions & (1 << EVENTS.index(event)))
        cadence = self.cadences[event]
        if step == self.steps_planned:
            return cadence.unit != "never" or event == "save"
        return by_clock or cadence.is_due(step, self.steps_per_epoch, self.steps_planned)


@dataclass
class Training:
    """A run, put together by `run.py`: `step` is the number of finished steps."""

    world: ProcessGroup
    stepper: Stepper
    schedule: Schedule
    timetable: Timetable
    recorder: Recorder
    clock: Clock
    nonfinite: Policy
    stop: StopFlag
    batches: Iterator[Sequence[Any]]
    evaluate: Callable[[], dict[str, float]]
    check_replicas: Callable[[int], None]
    saver: Saver
    step: int


def train(t: Training) -> bool:
    """Train to the planned step: True when it is reached, False when a signal ended the run before.

    Raises NonFiniteError and ReplicaMismatchError (all ranks at the same step); errors of torch and of the
    task pass through.
    """
    planned, first = t.timetable.steps_planned, t.step
    t.clock.begin("train")
    while t.step < planned:
        t.clock.begin_step()
        micro_batches = next(t.batches)
        t.clock.enter("transfer")
        if t.step == first:
            t.recorder.costs(t.stepper.settle(micro_batches, t.step, t.recorder.known_costs))
        rate = t.schedule.set(t.step)
        proposal = Proposal(bool(t.stop), t.timetable.decisions(t.world.is_first))
        agreed = t.stepper.take(micro_batches, t.step, proposal)
        t.schedule.advance()
        t.step += 1
        if t.step == first + 1:
            t.recorder.event("training", step=t.step)
        t.recorder.end_step(agreed, rate)
        t.nonfinite.consider(agreed)
        due = t.timetable.due(t.step, agreed)
        if due & {"log", "save", "snapshot"}:
            last = t.recorder.late(t.stepper.drain())
            t.nonfinite.consider(last)
            due |= t.timetable.due(t.step, last)
            agreed = last or agreed
        if due:
            t.clock.pause()
        if "check" in due:
            t.check_replicas(t.step)
        if "log" in due:
            gathering = t.world.gather_rows(t.recorder.own_times())
            t.recorder.log_interval(t.step, t.stepper.read(), gathering)
        if "eval" in due:
            with t.clock.phase("eval"):
                t.recorder.evaluated(t.step, t.evaluate())
        if "snapshot" in due:  # after the step's lines in the journal: a resume drops later ones only
            t.saver.snapshot(t.step)
        if "save" in due:
            with t.clock.phase("checkpoint"):
                t.saver.save(t.step)
        if agreed is not None and agreed.stop and t.step < planned:
            return False
    return True
