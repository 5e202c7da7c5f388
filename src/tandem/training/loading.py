"""Compare a checkpoint's names and shapes with a model's, then load its state: model, optimizer, schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tandem.distributed.strategy import Strategy
from tandem.errors import ConfigError
from tandem.training.buffers import adopt_buffers, is_lazy
from tandem.training.optim import Schedule, check_groups

KERNELS = ("fused", "foreach", "capturable")
"""Entries of an optimizer's group that select a kernel and do not change the result."""
# torch stores the result of a module's get_extra_state() under this name.
EXTRA = "_extra_state"


def check_shapes(model_state: Mapping[str, Any], saved_state: Mapping[str, Any]) -> None:
    """Raise ConfigError naming the first tensor that differs between a model's state and a checkpoint's.

    The result of a module's get_extra_state() may change its shape.
    """
    for name in sorted({*model_state, *saved_state}):
        if name in saved_state and is_lazy(model_state.get(name)):
            continue  # it gets its shape when it is loaded
        here = tuple(getattr(model_state[name], "shape", ())) if name in model_state else "missing"
        there = tuple(getattr(saved_state[name], "shape", ())) if name in saved_state else "missing"
        is_extra = name.rpartition(".")[2] == EXTRA and name in model_state and name in saved_state
        if here != there and not is_extra:
            raise ConfigError(
                f"the checkpoint is from a different model: {name} is {there} in it but {here} here; "
                "use another --run-dir or --resume never"
            )


def check_model(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Call `check_shapes` with an error for verbs that build a task's model for a checkpoint."""
    adopt_buffers(model, weights)
    try:
        check_shapes(model.state_dict(), weights)
    except ConfigError as error:
        raise ConfigError(
            f"{str(error).partition(';')[0]}; use the task and fields it was trained with"
        ) from error


def load_state(
    state: Mapping[str, Any],
    strategy: Strategy,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    named: Mapping[str, Any],
) -> None:
    """Load a checkpoint's state. `named`: the optimizer's groups from `groups_of`.

    The optimizer's numbers (weight decay, momentum) come from the settings, which may have changed, unless
    the task built the optimizer or has its own scheduler. Raises ConfigError for another model or other
    groups; the checkpoint is left untouched.
    """
    theirs = state["model"]
    # Buffers that a forward pass resized take the saved shape first, or they would be refused. No value is
    # loaded before everything has been compared.
    adopt_buffers(model, theirs)
    check_shapes(model.state_dict(), theirs)
    check_groups("optimizer", state["optimizer"], state.get("groups"), optimizer, named)
    strategy.load_model(model, theirs)
    # Loading replaces the values of the groups, which the settings may override below.
    groups = [dict(group) for group in optimizer.param_groups]
    strategy.load_optimizer(optimizer, state["optimizer"])
    if schedule.is_by_settings:
        for group, ours in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in ours.items() if name != "params"})
    on_their_devices(optimizer, groups)
    schedule.load(state["schedule"], int(state["step"]))


def on_their_devices(optimizer: torch.optim.Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Select this device's kernels, wherever the checkpoint comes from, and move step counters to match.

    `before`: the groups as the optimizer was built. Adam counts steps on the host, but with fused or
    capturable on its device; `load_state_dict` follows the saved state instead.
    """
    for group, ours in zip(optimizer.param_groups, before, strict=True):
        group.update({name: ours[name] for name in KERNELS if name in ours})
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[name] = _moved_like(parameter, name, value, bool(on_device))


def _moved_like(
    parameter: torch.Tensor, name: str, value: torch.Tensor, steps_on_device: bool
) -> torch.Tensor:
    """Return a tensor of an optimizer's state on the device and in the layout that its kernels expect."""
    if name == "step":
        return value.to(parameter.device, torch.float32) if steps_on_device else value
    # A run with another --channels-last has saved its state with other strides.
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)
    return value
