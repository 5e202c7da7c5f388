"""The loop: everything that happens to a run, in order, on one screen."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from tandem.distributed.consensus import Consensus
from tandem.distributed.group import ProcessGroup
from tandem.schedule import Cadence
from tandem.signals import StopFlag
from tandem.tasks.base import WholeTask
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Readings
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
    def of(cls, steps_per_epoch: int, steps_planned: int, **every: str) -> "Timetable":
        """What each of EVENTS is every: "200", "1epoch", "30s", "10%" or "never"."""
        cadences = {event: Cadence.parse(every[event]) for event in EVENTS}
        return cls(cadences, steps_per_epoch, steps_planned)

    def steps_between(self, event: str) -> int | None:
        """Steps until `event` is first due; None where that is not by steps."""
        return self.cadences[event].to_steps(self.steps_per_epoch, self.steps_planned)

    def saves_every_evaluation(self) -> bool:
        """Whether a checkpoint is saved wherever an evaluation is due, so that --keep-best sees them all."""
        if self.cadences["eval"] == self.cadences["save"]:
            return self.cadences["eval"].unit != "never"
        evaluated, saved = self.steps_between("eval"), self.steps_between("save")
        return evaluated is not None and saved is not None and evaluated % saved == 0

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

    def due(self, step: int, consensus: Consensus | None) -> set[str]:
        """The events that happen after `step` finished steps; a stop that was agreed on means a save."""
        due = {event for event in EVENTS if self.is_due(event, step, consensus)}
        return due | {"save"} if consensus is not None and consensus.stop else due

    def is_due(self, event: str, step: int, consensus: Consensus | None) -> bool:
        """Whether `event` happens after `step` finished steps; the last step counts for all of them."""
        by_clock = consensus is not None and bool(consensus.decisions & (1 << EVENTS.index(event)))
        cadence = self.cadences[event]
        if step == self.steps_planned:
            return cadence.unit != "never" or event == "save"
        return by_clock or cadence.is_due(step, self.steps_per_epoch, self.steps_planned)


class Stepping(Protocol):
    """What is asked of whoever takes the steps: `Stepper`, or a loop of the user's own."""

    def read(self) -> Readings: ...
    def drain(self) -> Consensus | None: ...


@dataclass
class Course:
    """What follows each step of a run; `step` is the number of finished steps."""

    world: ProcessGroup
    stepper: Stepping
    timetable: Timetable
    recorder: Recorder
    clock: Clock
    nonfinite: Policy
    evaluate: Callable[[], dict[str, float]]
    ends: Callable[[int, Mapping[str, float]], bool]
    check_replicas: Callable[[int], None]
    saver: Saver
    step: int


@dataclass
class Training(Course):
    """A run of a task, put together by `run.py`."""

    task: WholeTask
    model: nn.Module
    stepper: Stepper
    schedule: Schedule
    stop: StopFlag
    batches: Iterator[Sequence[Any]]


def train(t: Training) -> bool:
    """Train to the planned step: True when it is reached, or the task ended the run before; False when a
    signal did.

    Raises NonFiniteError and ReplicaMismatchError (all ranks at the same step); errors of torch and of the
    task pass through.
    """
    planned, first = t.timetable.steps_planned, t.step
    settles_at, an_epoch = first, t.timetable.steps_per_epoch
    t.clock.begin("train")
    while t.step < planned:
        t.clock.begin_step()
        micro_batches = next(t.batches)
        proposal = Proposal(bool(t.stop), t.timetable.decisions(t.world.is_first))
        t.clock.enter("transfer")
        if t.step == settles_at:
            epoch = t.step // an_epoch
            if t.stepper.freeze(epoch) or t.step == first:
                t.recorder.costs(t.stepper.settle(micro_batches, t.step, t.recorder.known_costs))
            settles_at = (epoch + 1) * an_epoch if "freeze" in t.task.own else planned
        rate = t.schedule.set(t.step)
        consensus = t.stepper.take(micro_batches, t.step, proposal)
        t.stop.is_heeded = True
        t.schedule.advance()
        t.task.after_step(t.model, t.step + 1)
        if after_step(t, consensus, rate, is_first=t.step == first):
            return t.saver.is_end
    return True


def after_step(t: Course, consensus: Consensus | None, rate: float, is_first: bool) -> bool:
    """What follows a step, whoever took it; whether the run ends here. Raises as `train`."""
    t.step += 1
    if is_first:
        t.recorder.event("training", step=t.step)
    t.recorder.end_step(rate)
    due = heed(t, consensus)
    if due & {"log", "save", "snapshot"}:
        last = t.stepper.drain()
        due |= heed(t, last)
        consensus = last or consensus
    if due:
        t.clock.pause()
    if "check" in due:
        t.check_replicas(t.step)
    if "log" in due:
        t.recorder.log_interval(t.step, t.stepper.read(), t.world.gather_rows)
    if {"eval", "save"} <= due:
        with t.clock.phase("checkpoint"):
            t.saver.begin(t.step)  # an evaluation that fails does not cost what was trained
    if "eval" in due and evaluate(t):
        due = {"save"}  # a snapshot would be gone on from
    if "snapshot" in due:  # after the step's lines in the journal: a resume drops later ones only
        with t.clock.phase("checkpoint") if t.saver.begins_snapshots else nullcontext():
            t.saver.snapshot(t.step)
    if "save" in due:
        with t.clock.phase("checkpoint"):
            t.saver.save(t.step)
    stops = consensus is not None and consensus.stop and t.step < t.timetable.steps_planned
    return stops or t.saver.is_end


def evaluate(t: Course) -> bool:
    """Score the weights of now; whether the task ends the run with them."""
    with t.clock.phase("eval"):
        scores = t.evaluate()
        t.recorder.evaluated(t.step, scores)
        if t.ends(t.step, scores) and t.step < t.timetable.steps_planned:
            t.saver.is_end = True
    return t.saver.is_end


def make_up(t: Course) -> None:
    """The evaluation in which the run had failed; the checkpoint of its step gets the scores."""
    if t.timetable.cadences["eval"].unit != "never":
        with t.clock.phase("checkpoint"):
            t.saver.begin(t.step)
        evaluate(t)
        with t.clock.phase("checkpoint"):
            t.saver.save(t.step)


def heed(t: Course, consensus: Consensus | None) -> set[str]:
    """What the ranks agreed on in a step is counted, whenever it is known; the events that are due now."""
    if consensus is not None:
        t.recorder.agreed(consensus)
        t.nonfinite.consider(consensus)
    return t.timetable.due(t.step, consensus)
