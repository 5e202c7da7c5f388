"""Optimizers and schedulers that a task brings: what they are told, and which settings they leave unread."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, SequentialLR

from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.training.optim import Schedule, build_optimizer

BARE = {name: lambda *_: None for name in ("build_model", "build_datasets", "loss")}


def schedule_of(settings: dict[str, Any], **methods: Any) -> Schedule:
    return made(settings, 40, **methods)[0]


def made(settings: dict[str, Any], planned: int, **methods: Any) -> tuple[Schedule, torch.optim.Optimizer]:
    task = TaskWithDefaults(type("Bare", (), BARE | methods)())
    config = Settings().replace(**settings).optimization
    optimizer = build_optimizer(config, task, nn.Linear(2, 2))
    return Schedule(config, 240, task, optimizer, 10, planned), optimizer


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
    state: Any = schedule.state()
    assert state["planned"] == state["scheduler"]["total_steps"] == 40
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
        ({"build_optimizer": adam}, {}, ""),
        (
            {"build_optimizer": adam}, {"lr": 0.1, "optimizer": "sgd"},  # the defaults, typed by somebody
            "no effect, because the task has its own optimizer: --optimizer sgd, --lr 0.1",
        ),
        ({"build_scheduler": one_cycle}, {"lr": 0.1}, ""),
        ({"build_optimizer": adam}, {"clip_norm": 1.0}, ""),
        (
            {"build_optimizer": adam}, GIVEN,
            "no effect, because the task has its own optimizer: --lr 0.3, --weight-decay 0.0, "
            "--schedule step, --warmup 5%",
        ),
        (
            {"build_scheduler": one_cycle}, GIVEN,
            "no effect, because the task has its own scheduler: --schedule step, --warmup 5%",
        ),
    ],
)  # fmt: skip
def test_settings_without_effect_are_named_in_one_line(
    methods: dict[str, Any], settings: dict[str, Any], expected: str
) -> None:
    assert schedule_of(settings, **methods).without_effect(settings.keys()) == expected


@pytest.mark.parametrize(
    "methods, settings, used, said",
    [
        (
            {}, {"lr": 0.2, "lr_scaling": "linear:120"},
            {"optimizer": "SGD", "lr": 0.4, "schedule": "cosine"}, "lr 0.2 x 240/120 (linear) = 0.4",
        ),
        (
            {"build_optimizer": adam}, {},
            {"optimizer": "Adam", "lr": 0.003, "schedule": None}, "lr from the task's own optimizer, Adam",
        ),
        (
            {"build_scheduler": one_cycle}, {"optimizer": "adamw"},
            {"optimizer": "AdamW", "lr": 0.02, "schedule": "OneCycleLR"},
            "lr from the task's own scheduler, OneCycleLR",
        ),
    ],
)  # fmt: skip
def test_what_takes_the_steps_is_said(
    methods: dict[str, Any], settings: dict[str, Any], used: dict[str, Any], said: str
) -> None:
    schedule = schedule_of(settings, **methods)
    for step in range(5):
        schedule.set(step)
        schedule.advance()
    assert schedule.used() == pytest.approx(used) and schedule.describe().startswith(said)


def cosine(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    return CosineAnnealingLR(optimizer, T_max=total_steps)


def by_a_function(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: 1 - step / total_steps)


class Falling:
    """What state_dict() keeps of a LambdaLR: the numbers of an object, and nothing of a function."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return 1 - step / self.steps


def by_an_object(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    return LambdaLR(optimizer, Falling(total_steps))


def one_after_another(self: Any, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler:
    parts: list[LRScheduler] = [
        LambdaLR(optimizer, lambda step: step / 5),
        cosine(self, optimizer, total_steps - 5),
    ]
    return SequentialLR(optimizer, parts, milestones=[5])


OWN = [one_cycle, cosine, by_a_function, by_an_object, one_after_another]


def taken(schedule: Schedule, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[Any]:
    """Rate and momentum of each of the steps."""
    seen = []
    for step in range(begin, end):
        seen.append((schedule.set(step), optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        schedule.advance()
    return seen


def resumed(saved_of: int, planned: int, step: int, **methods: Any) -> tuple[Schedule, torch.optim.Optimizer]:
    """A run of `planned` steps that goes on from `step` of one that was of `saved_of`."""
    before, optimizer = made({}, saved_of, **methods)
    taken(before, optimizer, 0, step)
    saved = optimizer.state_dict(), before.state()
    after, optimizer = made({}, planned, **methods)
    optimizer.load_state_dict(saved[0])
    after.load(saved[1], step)
    return after, optimizer


@pytest.mark.parametrize("method", OWN)
@pytest.mark.parametrize("saved_of, planned, step", [(20, 40, 20), (40, 30, 20), (20, 40, 0), (40, 40, 20)])
@pytest.mark.filterwarnings("ignore:The epoch parameter in")  # torch 2.6's SequentialLR warns of itself
@pytest.mark.filterwarnings("error")
def test_a_longer_run_has_the_schedule_of_all_its_steps(
    method: Any, saved_of: int, planned: int, step: int
) -> None:
    schedule, optimizer = resumed(saved_of, planned, step, build_scheduler=method)
    calm = taken(*made({}, planned, build_scheduler=method), 0, planned)
    assert taken(schedule, optimizer, step, planned) == calm[step:]


@pytest.mark.parametrize("method", OWN)
def test_a_plain_resume_restores_what_was_saved(method: Any) -> None:
    calm, _ = made({}, 40, build_scheduler=method)
    schedule, _ = resumed(40, 40, 20, build_scheduler=method)
    for _ in range(20):
        calm.advance()
    assert str(schedule.state()) == str(calm.state())


def test_a_scheduler_as_older_versions_saved_it_is_restored() -> None:
    before, _ = made({}, 40, build_scheduler=cosine)
    for _ in range(20):
        before.advance()
    state: Any = before.state()
    after, _ = made({}, 40, build_scheduler=cosine)
    after.load(state["scheduler"], 20)
    assert after.state() == before.state()


def test_what_no_scheduler_moves_stays_as_it_was_saved() -> None:
    schedule, optimizer = made({}, 20, build_scheduler=one_cycle)
    optimizer.param_groups[0]["weight_decay"] = 0.25
    saved = optimizer.state_dict(), schedule.state()
    schedule, optimizer = made({}, 40, build_scheduler=one_cycle)
    optimizer.load_state_dict(saved[0])
    schedule.load(saved[1], 0)
    assert optimizer.param_groups[0]["weight_decay"] == 0.25


def test_a_scheduler_of_fewer_steps_than_the_run_is_a_mistake() -> None:
    def fixed(self: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=0.5, total_steps=20)

    made({}, 20, build_scheduler=fixed)
    with pytest.raises(
        ConfigError, match=r"line \d+: fixed returns .*OneCycleLR of 20 steps for a run of 40;"
    ):
        made({}, 40, build_scheduler=fixed)


def test_a_scheduler_that_cannot_be_brought_to_its_place_is_one_line() -> None:
    class Stubborn(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            if getattr(self, "is_made", False):
                raise ValueError("I step by hand")
            super().step()
            self.is_made = True

    def stubborn(self: Any, optimizer: torch.optim.Optimizer) -> LRScheduler:
        return Stubborn(optimizer, lambda step: 1.0)

    state: Any = {"planned": 20, "scheduler": {}}
    schedule, _ = made({}, 40, build_scheduler=stubborn)
    with pytest.raises(
        ConfigError, match=r"cannot reach step 20 of 40 \(ValueError: I step by hand\);"
    ):
        schedule.load(state, 20)
