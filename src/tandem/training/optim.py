"""Build the optimizer and set the learning rate of each step, by the settings or by the task."""

import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from inspect import signature
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.slices import OptimizationConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError
from tandem.schedule import Cadence, learning_rate, scale_lr, scaling_of
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.build import optimizer_of, scheduler_of
from tandem.tasks.mistakes import kind, mistake
from tandem.text import one_line

# The learning rate of each step according to the settings.


class LearningRates:
    """A pure function of the step, so it has no state to save.

    It depends on the global batch size, not on the number of ranks.
    """

    def __init__(
        self, config: OptimizationConfig, batch_size: int, steps_per_epoch: int, steps_planned: int
    ) -> None:
        self._config = config
        self._batch_size = batch_size
        self._planned = steps_planned
        self._scaling, self._base = scaling_of(config.lr_scaling)
        self.peak = scale_lr(config.lr, self._scaling, batch_size, self._base)
        """The learning rate after the warm-up."""
        self._warmup = Cadence.parse(config.warmup).to_steps(steps_per_epoch, steps_planned) or 0

    def at(self, step: int) -> float:
        """Return the learning rate of the next step, numbered from 0."""
        return learning_rate(
            step,
            peak=self.peak,
            warmup_steps=self._warmup,
            steps_planned=self._planned,
            schedule=self._config.schedule,
        )

    def __str__(self) -> str:
        """Describe the rates: `lr 0.1 x 480/240 (linear) = 0.2, warm-up linear ..., then ...`."""
        config = self._config
        text = f"lr {self._config.lr:g}"
        if self._scaling != "none":
            ratio = f"{self._batch_size}/{self._base}"
            factor = f"sqrt({ratio})" if self._scaling == "sqrt" else ratio
            text += f" x {factor} ({self._scaling}) = {self.peak:.4g}"
        if self._warmup:
            text += f", warm-up linear over {self._warmup:,} steps"
        end = "" if config.schedule == "constant" else f" to step {self._planned:,}"
        return f"{text}, {'then ' if self._warmup else ''}{config.schedule}{end}"


# Clip gradients by their norm, and report the norm from before and the number of clipped steps.


class Clipping:
    """Clip the gradients of `parameters` to a norm of `clip_norm`.

    Only `norm` and `count`, which are for log lines, wait for the device. The reported norm is from before
    clipping.
    """

    def __init__(
        self,
        optimization: OptimizationConfig,
        strategy: Strategy,
        parameters: Sequence[nn.Parameter],
        world: ProcessGroup,
    ) -> None:
        self._largest = optimization.clip_norm
        self._strategy = strategy
        self._parameters = parameters
        self._norm: Tensor | None = None
        self._clips = torch.zeros((), device=world.device)

    def begin_step(self) -> None:
        """Forget the last norm. A skipped step is not clipped."""
        self._norm = None

    def clip(self) -> None:
        """Clip, after the gradients are unscaled and before the optimizer steps."""
        if self._largest is None:
            return
        self._norm = self._strategy.clip(self._parameters, self._largest)
        # On GPUs and under fp16, this step may be skipped. It then does not count as clipped.
        self._clips += (self._norm > self._largest) & self._norm.isfinite()

    def norm(self) -> float | None:
        """Return the norm of the last step's gradients before clipping, or None if unknown or not finite."""
        norm = self._norm if self._largest is not None else self._strategy.norm(self._parameters)
        return float(norm) if norm is not None and math.isfinite(norm) else None

    def count(self) -> int:
        """Return the number of clipped steps since the last call."""
        clips = int(self._clips)
        self._clips.zero_()
        return clips


# Save an optimizer's parameter groups by name, because its own state identifies parameters only by number.
#
# A number that refers to another parameter causes an error deep inside the optimizer, or none if the shapes
# agree. So the names are saved next to the state, and compared before it is loaded.

OF_THE_SHAPE = frozenset({
    "momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg",
    "acc_delta", "sum", "prev", "step_size", "ax", "mu_product_buffer",
})  # fmt: skip
"""Entries of torch's optimizer states that have the parameter's shape."""
SHOWN = 3


def groups_of(optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    """Return the optimizer's class and its parameters' names by group; "" for one that is not in `named`."""
    names = {id(parameter): name for name, parameter in named}
    groups = [[names.get(id(each), "") for each in group["params"]] for group in optimizer.param_groups]
    return {"class": type(optimizer).__name__, "names": groups}


def check_groups(
    what: str,
    saved: Mapping[str, Any],
    theirs: Mapping[str, Any] | None,
    optimizer: torch.optim.Optimizer,
    ours: Mapping[str, Any],
) -> None:
    """Raise ConfigError if the `saved` state of the optimizer `what` belongs to other groups than its own.

    `theirs` and `ours` come from `groups_of`; None means that an older version saved no names.
    """
    try:
        sizes = [len(group["params"]) for group in saved["param_groups"]]
        values = {int(index): dict(state) for index, state in saved["state"].items()}
        kind, names = (None, []) if theirs is None else (theirs["class"], list(theirs["names"]))
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise _other(what, "it is not the state of a PyTorch optimizer") from error
    if kind is not None and kind != ours["class"]:
        raise _other(what, f"it was saved by {kind}, but this optimizer is {ours['class']}")
    here = [len(group["params"]) for group in optimizer.param_groups]
    if len(sizes) != len(here):
        raise _other(what, f"it has {len(sizes)} parameter groups, this optimizer has {len(here)}")
    for number, (there, ours_here) in enumerate(zip_longest(names, ours["names"] if names else [])):
        if there != ours_here:
            raise _other(what, f"group {number} is {_listed(there)} in it but {_listed(ours_here)} here")
    # Names make a better message, but an older version saved none.
    if sizes != here:
        raise _other(what, f"its groups have {_counts(sizes)} parameters, but {_counts(here)} here")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, state in values.items():
        for name, value in state.items():
            shape = tuple(parameters[index].shape) if 0 <= index < len(parameters) else "missing"
            # Entries of other optimizers may have any shape.
            if name in OF_THE_SHAPE and isinstance(value, Tensor) and tuple(value.shape) != shape:
                raise _other(
                    what, f"{name} of parameter {index} is {tuple(value.shape)} in it but {shape} here"
                )


def _other(what: str, how: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint's {what} does not match: {how}; build the optimizer as it was when saved, with the "
        "same groups in the same order, or use another --run-dir or --resume never"
    )


def _listed(names: Sequence[str] | None) -> str:
    more = f" and {len(names) - SHOWN} more" if names and len(names) > SHOWN else ""
    return (", ".join(name or "an unnamed parameter" for name in (names or [])[:SHOWN]) or "nothing") + more


def _counts(sizes: Sequence[int]) -> str:
    return " and ".join(map(str, sizes))


BY_SCHEDULE = ("schedule", "lr_scaling", "warmup")
BY_OPTIMIZER = ("optimizer", "lr", "momentum", "weight_decay")
"""Settings of OptimizationConfig that determine the learning rate, and those that build the optimizer."""
SCHEDULED = ("lr", "momentum", "betas")
"""Entries of an optimizer's groups that a scheduler changes, besides those that its constructor adds."""


def build_optimizer(
    config: OptimizationConfig, task: TaskWithDefaults, model: nn.Module, has_all_gradients: bool = True
) -> torch.optim.Optimizer:
    """Build the task's own optimizer if it has one, else the one that the settings name.

    On GPUs, it is fused if torch has a fused version for these parameters, because that can skip an update
    without the host (`nonfinite.Guard`). `has_all_gradients`: each step trains all parameters.
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
    return any(getattr(module, "sparse", False) is True for module in model.modules())


def takes_closure(optimizer: torch.optim.Optimizer, must: bool) -> bool:
    """Return whether `step` takes a closure that recomputes loss and gradients; with `must`, requires one."""
    closure = signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and not (must and closure.default is None)


def trained_by(task: TaskWithDefaults, model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that some step trains; if a task freezes them by epoch, that may be all."""
    return [p for p in model.parameters() if p.requires_grad or "freeze" in task.own]


class Schedule:
    """Set the learning rate before each step, by the settings' rule or the task's own scheduler."""

    def __init__(
        self,
        config: OptimizationConfig,
        batch_size: int,
        task: TaskWithDefaults,
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
        self._rates = LearningRates(config, batch_size, epoch_steps, planned)
        self._fixed = "build_optimizer" in task.own
        self._config = config

    @property
    def is_by_settings(self) -> bool:
        """Whether the settings alone decide the rates, because the task has no optimizer or scheduler."""
        return self._own is None and not self._fixed

    def describe(self) -> str:
        """Return one line that says how the learning rates are derived."""
        if self.is_by_settings:
            return str(self._rates)
        used = self.used()
        own = f"optimizer, {used['optimizer']}" if self._own is None else f"scheduler, {used['schedule']}"
        return f"lr from the task's own {own}"

    def used(self) -> dict[str, object]:
        """Return facts about the optimizer and the scheduler for the run's summary.

        These are the optimizer's class, the learning rate of its first group before any schedule (from
        settings: their peak), and the scheduler: the class of the task's own, else the setting, or None if
        the task has its own optimizer.
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
        """Return one line about explicit settings that the task's own optimizer or scheduler overrides.

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

        A saved state for another number of planned steps does not apply; the scheduler is then stepped
        forward from its start.
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
                # torch warns about scheduler steps without an optimizer step before them.
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
