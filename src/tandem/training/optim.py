"""Build the optimizer and set the learning rate of each step, by the settings or by the task."""

import warnings
from collections.abc import Collection, Mapping
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from typing import Any

import torch
from torch import nn

from tandem.config.slices import OptimizationConfig
from tandem.data.datasets import one_line
from tandem.tasks.base import WholeTask
from tandem.tasks.build import optimizer_of, scheduler_of
from tandem.tasks.mistakes import kind, mistake
from tandem.training.rates import Rates

BY_SCHEDULE = ("schedule", "lr_scaling", "warmup")
BY_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Settings of OptimizationConfig that determine the learning rate, and those that build the optimizer."""
SCHEDULED = ("lr", "momentum", "betas")
"""What a scheduler changes in an optimizer's groups, besides what its constructor has added to them."""


def build_optimizer(
    config: OptimizationConfig, task: WholeTask, model: nn.Module, has_all_gradients: bool = True
) -> torch.optim.Optimizer:
    """Build the task's own optimizer if it has one, else the one that the settings name.

    On GPUs it is a fused one if torch has one for these parameters, because that can skip an update without
    the host (`nonfinite.Guard`). `has_all_gradients`: each step trains all parameters.
    """
    if (own := optimizer_of(task, model)) is not None:
        return own
    parameters = trained_by(task, model)
    lr = config.lr
    decay = config.weight_decay
    # torch's fused kernels reject complex parameters and sparse gradients.
    is_fit = not has_sparse_gradients(model) and not any(p.is_complex() for p in parameters)
    fused = (is_fit and all(p.is_cuda for p in parameters)) or None  # None: torch decides
    if config.optimizer == "sgd":
        momentum = config.momentum
        if momentum and ("freeze" in task.own or not has_all_gradients):
            fused = (
                None  # the fused kernel needs all momentum buffers from the first step on (torch 2.6 to 2.15)
            )
        # torch rejects Nesterov's method without momentum.
        return torch.optim.SGD(
            parameters, lr=lr, momentum=momentum, weight_decay=decay, nesterov=momentum > 0, fused=fused
        )
    kind = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=lr, weight_decay=decay, fused=fused)


def has_sparse_gradients(model: nn.Module) -> bool:
    """Return whether a module has sparse gradients."""
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def takes_closure(optimizer: torch.optim.Optimizer, must: bool) -> bool:
    """Return whether `step` takes a closure that recomputes loss and gradients; with `must`, requires one."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and not (must and closure.default is None)


def trained_by(task: WholeTask, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that some step trains; if a task freezes them by epoch, that may be all."""
    return [p for p in model.parameters() if p.requires_grad or "freeze" in task.own]


class Schedule:
    """Set the learning rate before each step, by the settings' rule or the task's own scheduler."""

    def __init__(
        self,
        config: OptimizationConfig,
        batch_size: int,
        task: WholeTask,
        optimizer: torch.optim.Optimizer,
        epoch_steps: int,
        planned: int,
    ) -> None:
        self._optimizer = optimizer
        self._planned = planned
        self._build = task.build_scheduler
        before = [{*group} for group in optimizer.param_groups]
        self._own = scheduler_of(task, optimizer, planned)
        # `load` may need the values from which the scheduler starts.
        self._made = [
            {name: deepcopy(group[name]) for name in group if name in SCHEDULED or name not in names}
            for group, names in zip(optimizer.param_groups, before, strict=True)
        ]
        self._rates = Rates(config, batch_size, epoch_steps, planned)
        self._fixed = "build_optimizer" in task.own
        self._config = config

    @property
    def is_by_settings(self) -> bool:
        """Whether the settings alone decide the rates, because the task has no optimizer or scheduler."""
        return self._own is None and not self._fixed

    def describe(self) -> str:
        """Return one line about where the rates come from."""
        if self.is_by_settings:
            return str(self._rates)
        used = self.used()
        own = f"optimizer, {used['optimizer']}" if self._own is None else f"scheduler, {used['schedule']}"
        return f"lr from the task's own {own}"

    def used(self) -> dict[str, object]:
        """Return what takes the steps, for the run's summary.

        That is the optimizer's class, the learning rate of its first group before any schedule (from
        settings: their peak), and the class of the task's own scheduler. Without one, it is the setting, or
        None if the task has its own optimizer.
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
        """Return one line about explicit settings that have no effect because of the task's own parts.

        `chosen`: the names of the settings that were set explicitly, even if to their defaults.
        """
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
        """Prepare the optimizer for the 0-based `step`; return the learning rate of its first group."""
        if self.is_by_settings:
            for group in self._optimizer.param_groups:
                group["lr"] = self._rates.at(step)
        return float(self._optimizer.param_groups[0]["lr"])

    def advance(self) -> None:
        """Advance the task's own scheduler, if there is one, after a step."""
        if self._own is not None:
            self._own.step()

    def state(self) -> dict[str, object]:
        """Return the state to save; empty unless the task has its own scheduler."""
        if self._own is None:
            return {}
        return {"planned": self._planned, "scheduler": self._own.state_dict()}

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Restore the task's own scheduler after `step` steps.

        A saved state for another number of planned steps does not apply, so the scheduler is stepped forward
        from its start instead.
        """
        if self._own is None or not state:
            return
        planned = state.get("planned", self._planned)  # missing in state of an older version
        if planned == self._planned:
            self._own.load_state_dict(state.get("scheduler", state))
            return
        for group, made in zip(self._optimizer.param_groups, self._made, strict=True):
            group.update(deepcopy(made))
        try:
            with warnings.catch_warnings():
                # About steps without an optimizer step before them.
                warnings.simplefilter("ignore", UserWarning)
                # OneCycleLR raises if it is stepped beyond its end.
                for _ in range(min(step, self._planned)):
                    self._own.step()
        except Exception as error:  # a task's scheduler may raise anything
            advice = "use the argument total_steps"
            got = (
                f"{kind(self._own)} that cannot reach step {step:,} of {self._planned:,} ({one_line(error)})"
            )
            raise mistake(self._build, got, f"{advice}, or train {planned:,} steps as before") from error
