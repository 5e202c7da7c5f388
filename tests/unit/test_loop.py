"""The loop with what the ranks agreed on arriving one step late, as it does on GPUs."""

from collections.abc import Set
from types import SimpleNamespace
from typing import Any, cast

import pytest
from gathered import Here
from torch import nn

from tandem.distributed.consensus import Consensus
from tandem.distributed.group import ProcessGroup
from tandem.errors import NonFiniteError
from tandem.schedule import Cadence
from tandem.signals import StopFlag
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs, Readings, StepTimes
from tandem.telemetry.recorder import Recorder
from tandem.training.loop import EventSchedule, TaskLoopState, train
from tandem.training.nonfinite import Policy
from tandem.training.step import Proposal


class StandingClock(Clock):
    """Every step takes the same time, and is known at once."""

    def end_step(self) -> list[StepTimes]:
        super().end_step()
        return [StepTimes(0.001, 0.0, 0.001, 0.001, 0.001, 0.0, wait=0.0)]


class LateStepper:
    """Tells of a step when the next one is taken, or when it is drained; `bad` steps are left out."""

    def __init__(self, bad: Set[int]) -> None:
        self.bad = bad
        self.pending: Consensus | None = None

    def take_dry_step(self, *_: Any) -> Costs:
        return Costs()

    def freeze(self, epoch: int) -> bool:
        return False

    def read(self) -> Readings:
        return Readings(None, None, 0, 0.0, None)

    def take(self, _batches: Any, step: int, proposal: Proposal) -> Consensus | None:
        before, bad = self.pending, step + 1 in self.bad
        self.pending = Consensus(step, float("nan") if bad else 1.0, proposal.stop, bad, proposal.decisions)
        return before

    def drain(self) -> Consensus | None:
        last, self.pending = self.pending, None
        return last


def training(
    bad: Set[int] = frozenset(),
    stop_at: int = 0,
    task: Any = None,
    policy: str = "stop",
    ends_at: int = 0,
    **cadences: str,
) -> tuple[TaskLoopState, list[int]]:
    """20 steps; a stop signal comes while step `stop_at` is prepared. The list fills with steps saved."""
    saved: list[int] = []
    stop = StopFlag()

    def batches() -> Any:
        for step in range(1, 100):
            stop.signal_number = 15 if step == stop_at else stop.signal_number
            yield []

    clock = StandingClock()
    recorder = Recorder(0, 1, lambda message: None, clock)
    recorder.begin_run(0, 10, 20, None, None, None)
    every = {
        "log": "never",
        "eval": "never",
        "save": "never",
        "check": "never",
        "snapshot": "never",
        "replay": "never",
        **cadences,
    }
    made = TaskLoopState(
        world=cast(ProcessGroup, SimpleNamespace(is_first=True, gather_rows=lambda row: Here([row]))),
        task=TaskWithDefaults(task),
        model=nn.Identity(),
        train_step=cast(Any, LateStepper(bad)),
        schedule=cast(Any, SimpleNamespace(set=lambda step: 0.1, advance=lambda: None)),
        event_schedule=EventSchedule({event: Cadence.parse(text) for event, text in every.items()}, 10, 20),
        recorder=recorder,
        clock=clock,
        nonfinite=Policy(policy, lambda: False, recorder),
        stop=stop,
        batches=batches(),
        evaluate=dict,
        ends=lambda step, scores: step == ends_at,
        check_replicas=lambda step: None,
        check_next_step=lambda: None,
        saver=cast(
            Any,
            SimpleNamespace(
                save=saved.append,
                begin=lambda step: None,
                snapshot=lambda step, has_lines, may_copy: None,
                begins_snapshots=False,
                is_copying=False,
                is_end=False,
            ),
        ),
        step=0,
    )
    return made, saved


@pytest.mark.parametrize("log_every", ["1", "5", "never"])
@pytest.mark.parametrize("stop_at", [4, 5, 6])
def test_a_stop_is_saved_whenever_it_is_heard_of(log_every: str, stop_at: int) -> None:
    made, saved = training(stop_at=stop_at, log=log_every)
    assert train(made) is False
    assert saved == [made.step] and made.step in (stop_at, stop_at + 1)


@pytest.mark.parametrize("save", ["never", "4", "5"])
def test_a_run_that_its_task_ends_is_saved_there_and_finished(save: str) -> None:
    made, saved = training(ends_at=8, eval="4", save=save)
    assert train(made) is True
    assert made.step == 8 and saved == {"never": [8], "4": [4, 8], "5": [5, 8]}[save]


@pytest.mark.parametrize("bad", [9, 10])
def test_nothing_is_saved_after_a_step_that_is_not_finite(bad: int) -> None:
    """Also not at step 10, when step 9's verdict and step 10's arrive together."""
    made, saved = training(bad={bad}, save="5")
    with pytest.raises(NonFiniteError, match=f"step {bad} is"):
        train(made)
    assert saved == [5]


def test_every_loss_belongs_to_its_own_log_interval() -> None:
    made, _ = training(log="5")
    seen = []
    made.recorder.log_interval = lambda *_: seen.append(made.recorder.state()["loss_count"])  # type: ignore[method-assign]
    assert train(made) is True
    assert seen == [5, 10, 15, 20]


def test_a_decision_by_the_clock_is_not_lost_when_it_is_heard_at_a_log_line() -> None:
    made, saved = training(log="5", save="3s")
    times = iter([0.0] * 9 + [4.0] * 50)  # the tenth step is beyond 3 s; it is a log step as well
    made.event_schedule.clock = lambda: next(times)
    assert train(made) is True
    assert saved == [10, 20]


def test_a_task_is_called_after_every_step_before_what_is_due_then() -> None:
    """Also after steps that are left out."""
    called: list[int] = []

    class Averaged:
        def after_step(self, model: nn.Module, step: int) -> None:
            assert isinstance(model, nn.Identity)
            called.append(step)

    made, saved = training(bad={7, 8}, task=Averaged(), policy="skip", save="5")
    made.saver.save = lambda step: saved.append(called[-1])  # type: ignore[method-assign]
    assert train(made) is True
    assert called == [*range(1, 21)] and saved == [5, 10, 15, 20]


def test_a_snapshot_is_copied_only_if_no_rank_still_copies_at_its_step() -> None:
    """Copies of different steps make no state; the bit of an earlier step says nothing about this one."""
    made, saved = training(snapshot="2", log="5")
    begun: dict[int, bool] = {}

    class Copying(SimpleNamespace):
        @property
        def is_copying(self) -> bool:
            return made.step in (3, 4, 6)  # while steps 4, 5 and 7 are taken

        def snapshot(self, step: int, has_lines: bool, may_copy: bool) -> None:
            begun[step] = may_copy

    made.saver = cast(
        Any, Copying(save=saved.append, begin=saved.append, begins_snapshots=False, is_end=False)
    )
    assert train(made) is True
    assert begun == {step: step != 4 for step in range(2, 21, 2)}
    assert saved[-1] == 20, "bits of copies are none of events"
