"""Optimizers and schedulers that a task brings: what they are told, and which settings they leave unread."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from tandem.config import Settings
from tandem.tasks.base import WholeTask
from tandem.training.optim import Schedule, build_optimizer

BARE = {name: lambda *_: None for name in ("build_model", "build_datasets", "loss")}


def schedule_of(settings: dict[str, Any], **methods: Any) -> Schedule:
    task = WholeTask(type("Bare", (), BARE | methods)())
    config = Settings().replace(**settings).optimisation
    optimizer = build_optimizer(config, task, nn.Linear(2, 2))
    return Schedule(config, 240, task, optimizer, 10, 40)


def one_cycle(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=0.5, total_steps=total_steps)


def by_keyword(self: Any, optimizer: torch.optim.Optimizer, *, total_steps: int) -> LRScheduler:
    return one_cycle(self, optimizer, total_steps)


def with_default(self: Any, optimizer: torch.optim.Optimizer, total_steps: int = 3) -> LRScheduler:
    return one_cycle(self, optimizer, total_steps)


def by_another_name(self: Any, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
    return one_cycle(self, optimizer, steps)


@pytest.mark.parametrize("method", [one_cycle, by_keyword, with_default, by_another_name])
def test_a_scheduler_is_told_the_steps_of_the_run_if_it_asks(method: Any) -> None:
    schedule = schedule_of({}, build_scheduler=method)
    rates = []
    for step in range(40):
        rates.append(schedule.set(step))
        schedule.advance()
    assert schedule.state()["total_steps"] == 40
    assert max(rates) == pytest.approx(0.5) and rates[-1] < rates[0] < 0.05


def test_a_scheduler_that_does_not_ask_is_not_told() -> None:
    def halves(self: Any, optimizer: torch.optim.Optimizer, gamma: float = 0.5) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: gamma**step)

    schedule = schedule_of({"lr": 0.2}, build_scheduler=halves)
    schedule.advance()
    assert schedule.set(1) == pytest.approx(0.1)


def adam(self: Any, model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.003)


GIVEN = {"lr": 0.3, "weight_decay": 0.0, "warmup": "5%", "schedule": "step", "clip_norm": 1.0}


@pytest.mark.parametrize(
    "methods, settings, expected",
    [
        ({}, GIVEN, ""),
        ({"build_optimizer": adam}, {"clip_norm": 1.0}, ""),
        (
            {"build_optimizer": adam}, GIVEN,
            "without effect beside the task's own optimizer: --lr 0.3, --weight-decay 0.0, --schedule step, "
            "--warmup 5%",
        ),
        (
            {"build_scheduler": one_cycle}, GIVEN,
            "without effect beside the task's own scheduler: --schedule step, --warmup 5%",
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named_in_one_line(
    methods: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    assert schedule_of(settings, **methods).without_effect() == expected
