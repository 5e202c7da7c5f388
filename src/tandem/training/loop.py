"""Run the training loop: everything that happens in a run, in order, on one screen."""

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
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Readings
from tandem.telemetry.recorder import Recorder
from tandem.training.nonfinite import Policy
from tandem.training.optim import Schedule
from tandem.training.saving import Saver
from tandem.training.step import Proposal, TrainStep

# An event's position is its bit in the decisions that the ranks exchange.
EVENTS = ("log", "eval", "save", "check", "snapshot", "replay")
COPYING = 1 << len(EVENTS)
"""Each rank adds this to the bits while the next node has not yet received its last copy."""


@dataclass
class EventSchedule:
    """When each of EVENTS is due: by step number, which all ranks know, or by rank 0's clock.

    The clock's decisions travel as bits in the step's all-reduce, so all ranks act together. See
    docs/architecture.md#the-telemetry-parameter.
    """

    cadences: dict[str, Cadence]
    steps_per_epoch: int
    steps_planned: int
    clock: Callable[[], float] = time.monotonic
    _last: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, steps_per_epoch: int, steps_planned: int, **every: str | Cadence) -> "EventSchedule":
        """Create a schedule from an interval for each of EVENTS, or its text, as `Cadence.parse` reads it."""
        cadences = {}
        for event in EVENTS:
            given = every[event]
            cadences[event] = Cadence.parse(given) if isinstance(given, str) else given
        return cls(cadences, steps_per_epoch, steps_planned)

    def steps_between(self, event: str) -> int | None:
        """Return the number of steps until `event` is first due, or None if it is not due by steps."""
        return self.cadences[event].to_steps(self.steps_per_epoch, self.steps_planned)

    def saves_every_evaluation(self) -> bool:
        """Return whether every evaluation has a checkpoint, so that --keep-best can compare all of them."""
        if self.cadences["eval"] == self.cadences["save"]:
            return self.cadences["eval"].unit != "never"
        evaluated = self.steps_between("eval")
        saved = self.steps_between("save")
        return evaluated is not None and saved is not None and evaluated % saved == 0

    def decisions(self, is_first: bool) -> int:
        """Return rank 0's time-based decisions for this step as bits; 0 on the other ranks."""
        # The exchange adds up the bits of all ranks, and the clocks of nodes differ. So only rank 0 decides.
        if not is_first:
            return 0
        now = self.clock()
        bits = 0
        for position, event in enumerate(EVENTS):
            # The first interval begins here, because a launch may have waited long for other ranks.
            if self.cadences[event].is_due_by_time(now - self._last.setdefault(event, now)):
                self._last[event] = now
                bits |= 1 << position
        return bits

    def due(self, step: int, consensus: Consensus | None) -> set[str]:
        """Return the events that are due after `step` finished steps. An agreed stop means a save."""
        due = {event for event in EVENTS if self.is_due(event, step, consensus)}
        return due | {"save"} if consensus is not None and consensus.stop else due

    def is_due(self, event: str, step: int, consensus: Consensus | None) -> bool:
        """Return whether `event` is due after `step` finished steps. The last step has every event."""
        by_clock = consensus is not None and bool(consensus.decisions & (1 << EVENTS.index(event)))
        cadence = self.cadences[event]
        if step == self.steps_planned:
            # A checkpoint of the last step is how the agent knows that a task has finished.
            return cadence.unit != "never" or event == "save"
        return by_clock or cadence.is_due(step, self.steps_per_epoch, self.steps_planned)


class StepReader(Protocol):
    """The interface of the object that takes steps: `TrainStep`, or a custom loop's."""

    def read(self) -> Readings: ...
    def drain(self) -> Consensus | None: ...


@dataclass
class LoopState:
    """Everything that follows each step of a run; `step` is the number of finished steps."""

    world: ProcessGroup
    train_step: StepReader
    event_schedule: EventSchedule
    recorder: Recorder
    clock: Clock
    nonfinite: Policy
    evaluate: Callable[[], dict[str, float]]
    ends: Callable[[int, Mapping[str, float]], bool]
    check_replicas: Callable[[int], None]
    check_next_step: Callable[[], None]
    saver: Saver
    step: int


@dataclass
class TaskLoopState(LoopState):
    """A task's run, assembled by `rank/task.py`."""

    task: TaskWithDefaults
    model: nn.Module
    train_step: TrainStep
    schedule: Schedule
    stop: StopFlag
    batches: Iterator[Sequence[Any]]


def train(t: TaskLoopState) -> bool:
    """Train to the planned step; return False if a signal ended the run before, else True.

    Also returns True if the task ended the run early. Raises NonFiniteError and ReplicaMismatchError on all
    ranks at the same step. Errors of torch and of the task propagate.
    """
    planned = t.event_schedule.steps_planned
    first = t.step
    next_dry_step = first
    an_epoch = t.event_schedule.steps_per_epoch
    t.clock.begin("train")
    while t.step < planned:
        t.clock.begin_step()
        micro_batches = next(t.batches)
        decisions = t.event_schedule.decisions(t.world.is_first) + COPYING * t.saver.is_copying
        proposal = Proposal(bool(t.stop), decisions)
        t.clock.enter("transfer")
        # Take the dry step before the first step, and again whenever the task freezes other parameters.
        if t.step == next_dry_step:
            epoch = t.step // an_epoch
            if t.train_step.freeze(epoch) or t.step == first:
                t.recorder.costs(t.train_step.take_dry_step(micro_batches, t.step, t.recorder.known_costs))
            # Without freeze(), DDP reduces the same parameters until the end.
            next_dry_step = (epoch + 1) * an_epoch if "freeze" in t.task.own else planned
        rate = t.schedule.set(t.step)
        consensus = t.train_step.take(micro_batches, t.step, proposal)
        # Without an agent, launch/standalone_rank.py ends a process that has nothing new to save yet. See
        # docs/architecture.md#a-sigterm.
        t.stop.is_polled = True
        # torch warns if a scheduler steps before its optimizer, and then skips the first rate.
        t.schedule.advance()
        t.task.after_step(t.model, t.step + 1)
        if after_step(t, consensus, rate, is_first=t.step == first):
            return t.saver.is_end
    return True


def after_step(t: LoopState, consensus: Consensus | None, rate: float, is_first: bool) -> bool:
    """Do everything that follows a step; return whether the run ends. Raises the errors of `train`."""
    t.step += 1
    if is_first:
        t.recorder.event("training", step=t.step)
    t.recorder.end_step(rate)
    due = apply_consensus(t, consensus)
    # On GPUs, the last step's exchange is still unread. A log line needs its numbers, and a save must not
    # contain a step that turns out to be non-finite.
    if due & {"log", "save", "snapshot"}:
        last = t.train_step.drain()
        due |= apply_consensus(t, last)
        consensus = last or consensus
    if due:
        # Evaluations and saves are not part of a step, whose time shows stragglers.
        t.clock.pause()
    if "check" in due:
        # The check comes before any save, which would make diverged weights permanent.
        t.check_replicas(t.step)
    if "replay" in due:
        t.check_next_step()
    if "log" in due:
        t.recorder.log_interval(t.step, t.train_step.read(), t.world.gather_rows)
    if {"eval", "save"} <= due:
        with t.clock.phase("checkpoint"):
            t.saver.begin(t.step)  # a failed evaluation must not cost the training since the last save
    if "eval" in due and evaluate(t):
        due = {"save"}  # no snapshot: a restart would train on from it after the end
    if "snapshot" in due:  # after the step's lines in the journal, because a resume drops only later lines
        with t.clock.phase("checkpoint") if t.saver.begins_snapshots else nullcontext():
            # Copies count only if all are of one step, so a rank begins one only if no rank is still copying.
            may_copy = consensus is not None and consensus.decisions < COPYING
            t.saver.snapshot(t.step, has_lines=bool(due & {"log", "eval"}), may_copy=may_copy)
    if "save" in due:
        with t.clock.phase("checkpoint"):
            t.saver.save(t.step)
    # A stop that arrives in the last step changes nothing: the run has finished.
    stops = consensus is not None and consensus.stop and t.step < t.event_schedule.steps_planned
    return stops or t.saver.is_end


def evaluate(t: LoopState) -> bool:
    """Score the current weights; return whether the task ends the run."""
    with t.clock.phase("eval"):
        scores = t.evaluate()
        t.recorder.evaluated(t.step, scores)
        if t.ends(t.step, scores) and t.step < t.event_schedule.steps_planned:
            t.saver.is_end = True
    return t.saver.is_end


def repeat_evaluation(t: LoopState) -> None:
    """Repeat the evaluation in which the run failed; the checkpoint of its step gets the scores."""
    if t.event_schedule.cadences["eval"].unit != "never":
        with t.clock.phase("checkpoint"):
            t.saver.begin(t.step)
        evaluate(t)
        with t.clock.phase("checkpoint"):
            t.saver.save(t.step)


def apply_consensus(t: LoopState, consensus: Consensus | None) -> set[str]:
    """Count what the ranks agreed on in a step, whenever it becomes known; return the events that are due."""
    if consensus is not None:
        t.recorder.agreed(consensus)
        t.nonfinite.consider(consensus)
    return t.event_schedule.due(t.step, consensus)
