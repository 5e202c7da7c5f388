"""What goes on after a resume beside the weights: an open log interval, and settings that have changed."""

import json
from pathlib import Path

import pytest
import torch
from gathered import Here
from torch import nn

from tandem.config.slices import ComputeConfig, ExchangeConfig, OptimizationConfig
from tandem.distributed.consensus import Consensus
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.strategy.single import SingleStrategy as Single
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.journal import Journal
from tandem.telemetry.recorder import Recorder
from tandem.training.optim import Schedule, build_optimizer, groups_of
from tandem.training.step import Readings
from tandem.training.train_state import load_state

READINGS = Readings(None, None, 0, 0.0, None)


class Plain:
    pass


class OwnScheduler:
    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def recorder(folder: Path) -> Recorder:
    found = Recorder(0, 8, lambda message: None, Clock())
    found.begin_run(0, 10, 10, Journal(folder), None, None)
    return found


def steps(of: Recorder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        loss = float("nan") if step == 4 else step / 3
        agreed = Consensus(step - 1, loss, False, step == 4, 0, {"accuracy": (step, 8.0), "rare": (0.0, 0.0)})
        of.clock.begin_step()
        of.end_step(0.1)
        of.agreed(agreed)


def logged(folder: Path, name: str = "loss") -> list[object]:
    return [json.loads(line).get(name) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_interval_that_is_open_at_a_checkpoint_is_logged_whole(tmp_path: Path) -> None:
    calm = recorder(tmp_path / "calm")
    steps(calm, 1, 7)
    calm.log_interval(7, READINGS, lambda row: Here([row]))
    before, after = recorder(tmp_path / "before"), recorder(tmp_path / "after")
    steps(before, 1, 5)
    after.load(before.state())
    steps(after, 6, 7)
    after.log_interval(7, READINGS, lambda row: Here([row]))
    assert logged(tmp_path / "after") == logged(tmp_path / "calm") == [sum((1, 2, 3, 5, 6, 7)) / 3 / 6]
    # Of the task's sums as well: the mean over the interval, without the step that was left out.
    for folder in ("after", "calm"):
        assert logged(tmp_path / folder, "scores") == [{"accuracy": sum((1, 2, 3, 5, 6, 7)) / (6 * 8)}]


def test_an_interval_without_a_finite_loss_says_so(tmp_path: Path) -> None:
    only = recorder(tmp_path)
    steps(only, 4, 4)
    only.log_interval(4, READINGS, lambda row: Here([row]))
    assert logged(tmp_path) == ["NaN"]


@pytest.mark.parametrize("task, expected", [(Plain(), 0.5), (OwnScheduler(), 0.1)], ids=["settings", "own"])
def test_weight_decay_follows_the_settings_at_a_resume(task: object, expected: float) -> None:
    """A task's scheduler moves numbers of the optimizer by itself, so there the saved ones count."""
    model = nn.Linear(2, 1)

    def optimizer_and_schedule(decay: float) -> tuple[torch.optim.Optimizer, Schedule]:
        config, whole = OptimizationConfig(weight_decay=decay), TaskWithDefaults(task)  # type: ignore[arg-type]
        optimizer = build_optimizer(config, whole, model)
        return optimizer, Schedule(config, 240, whole, optimizer, 10, 10)

    old, schedule = optimizer_and_schedule(0.1)
    model(torch.ones(1, 2)).sum().backward()
    old.step()
    state = {"model": model.state_dict(), "optimizer": old.state_dict(), "schedule": schedule.state()}
    state["step"] = 0  # type: ignore[assignment]
    new, schedule = optimizer_and_schedule(0.5)
    alone = Single(ProcessGroup(Position(), torch.device("cpu")), ExchangeConfig(), ComputeConfig())
    load_state(state, alone, model, new, schedule, groups_of(new, model.named_parameters()))
    assert new.param_groups[0]["weight_decay"] == expected
    assert new.state_dict()["state"].keys() == old.state_dict()["state"].keys()
