"""The optimizer, and what sets the learning rate of each step: the settings, or the task."""

import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from tandem.config.slices import OptimisationConfig
from tandem.data.datasets import one_line
from tandem.tasks.base import WholeTask
from tandem.tasks.mistakes import kind, mistake
from tandem.tasks.parts import optimizer_of, scheduler_of
from tandem.training.rates import Rates

BY_SCHEDULE = ("schedule", "lr_scaling", "warmup")
BY_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Settings of OptimisationConfig that say what the rates are, and how the optimizer is made."""
SCHEDULED = ("lr", "momentum", "betas")
"""What a scheduler moves in an optimizer's groups, besides what its constructor has added to them."""


def build_optimizer(
    config: OptimisationConfig, task: WholeTask, model: nn.Module, has_all_gradients: bool = True
) -> torch.optim.Optimizer:
    """The task's own optimizer if it has one, else the one that the settings name.

    On GPUs it is a fused one, which can leave an update out without the host waiting (see `nonfinite.Guard`),
    unless torch has none for these parameters. `has_all_gradients`: each step trains all parameters.
    """
    if (own := optimizer_of(task, model)) is not None:
        return own
    parameters = trained_by(task, model)
    lr, decay = config.lr, config.weight_decay
    is_fit = not has_sparse_gradients(model) and not any(p.is_complex() for p in parameters)
    fused = (is_fit and all(p.is_cuda for p in parameters)) or None  # None: torch decides
    if config.optimizer == "sgd":
        momentum = config.momentum
        if momentum and ("freeze" in task.own or not has_all_gradients):
            fused = (
                None  # its kernel wants all momentum to be there from the first step on (torch 2.6 to 2.15)
            )
        return torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=momentum > 0, fused=fused
        )
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, weight_decay=decay, fused=fused)


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether some module gives its gradients as sparse tensors."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def takes_closure(optimizer: torch.optim.Optimizer, must: bool) -> bool:
    """Whether its `step` takes a function that computes loss and gradients again; `must`: not without it."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and not (must and closure.default is None)


def trained_by(task: WholeTask, model: nn.Module) -> list[nn.Parameter]:
    """The parameters that some step trains: where a task freezes them by epoch, all may be."""
    return [p for p in model.parameters() if p.requires_grad or "freeze" in task.own]


class Schedule:
    """Sets the learning rate before each step: the settings' rule, or the task's own scheduler."""

    def __init__(
        self,
        config: OptimisationConfig,
        batch_size: int,
        task: WholeTask,
        optimizer: torch.optim.Optimizer,
        epoch_steps: int,
        planned: int,
    ) -> None:
        self._optimizer, self._planned, self._build = optimizer, planned, task.build_scheduler
        before = [{*group} for group in optimizer.param_groups]
        self._own = scheduler_of(task, optimizer, planned)
        self._made = [
            {name: deepcopy(group[name]) for name in group if name in SCHEDULED or name not in names}
            for group, names in zip(optimizer.param_groups, before, strict=True)
        ]
        self._rates = Rates(config, batch_size, epoch_steps, planned)
        self._fixed = "build_optimizer" in task.own
        self._config = config

    @property
    def is_by_settings(self) -> bool:
        """Whether the settings alone decide the rates: neither optimizer nor scheduler is the task's own."""
        return self._own is None and not self._fixed

    def describe(self) -> str:
        """One line on where the rates come from."""
        if self.is_by_settings:
            return str(self._rates)
        used = self.used()
        own = f"optimizer, {used['optimizer']}" if self._own is None else f"scheduler, {used['schedule']}"
        return f"lr from the task's own {own}"

    def used(self) -> dict[str, object]:
        """What takes the steps, for the run's summary.

        The class of the optimizer, the rate of its first group before any schedule (by the settings: their
        peak), and the class of the task's own scheduler, else the settings' word, or None beside an optimizer
        of the task's own.
        """
        group = self._optimizer.param_groups[0]
        lr = self._rates.peak if self.is_by_settings else float(group.get("initial_lr", group["lr"]))
        schedule = type(self._own).__name__ if self._own is not None else self._config.schedule
        return {
            "optimizer": type(self._optimizer).__name__,
            "lr": lr,
            "schedule": None if self._fixed and self._own is None else schedule,
        }

    def without_effect(self, chosen: Collection[str]) -> str:
        """One line on those `chosen`, be it with their defaults, that the task's own parts leave unread."""
        if self.is_by_settings:
            return ""
        unread = (*BY_OPTIMIZER, *BY_SCHEDULE) if self._fixed else BY_SCHEDULE
        flags = [
            f"--{each.name.replace('_', '-')} {getattr(self._config, each.name)}"
            for each in fields(self._config)
            if each.name in unread and each.name in chosen
        ]
        kind = "optimizer" if self._fixed else "scheduler"
        return f"no effect, because the task has its own {kind}: {', '.join(flags)}" if flags else ""

    def set(self, step: int) -> float:
        """Prepare the optimizer for 0-based `step`; return the rate of its first group."""
        if self.is_by_settings:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rates.at(step)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """After a step: move the task's own scheduler on, if there is one."""
        if self._own is not None:
            self._own.step()

    def state(self) -> dict[str, object]:
        """What to save: empty unless the task brought a scheduler."""
        if self._own is None:
            return {}
        return {"planned": self._planned, "scheduler": self._own.state_dict()}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the task's own scheduler after `step` steps.

        One for another number of steps is not what was saved: it is brought to its place from its start.
        """
        if self._own is None or not state:
            return
        planned = state.get("planned", self._planned)  # absent: saved by an older version
        if planned == self._planned:
            self._own.load_state_dict(state.get("scheduler", state))
            return
        for group, made in zip(self._optimizer.param_groups, self._made, strict=True):
            group.update(deepcopy(made))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # that no step of the optimizer came before
                for _ in range(min(step, self._planned)):
                    self._own.step()
        except Exception as error:  # whatever a task's scheduler raises
            advice = "use the argument total_steps"
            got = (
                f"{kind(self._own)} that cannot reach step {step:,} of {self._planned:,} ({one_line(error)})"
            )
            raise mistake(self._build, got, f"{advice}, or train {planned:,} steps as before") from error
