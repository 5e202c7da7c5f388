"""Implement `--channels-last`: the memory layout of images that tensor cores read without a conversion."""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ConfigError


def lay_out(model: nn.Module, channels_last: bool, shares: str = "") -> None:
    """Convert the model's 4-D weights and inputs to channels-last, in place.

    Values and shapes stay the same, so checkpoints of both layouts are interchangeable. `shares` is the flag
    that shards the parameters, if any: a shard is a range of rows in the original order. Raises ConfigError
    for that combination.
    """
    if not channels_last:
        return
    if shares:
        raise ConfigError(f"--channels-last does not work with {shares}; remove it, or use --strategy ddp")
    model.to(memory_format=torch.channels_last)
    model.register_forward_pre_hook(_turned, with_kwargs=True)


def _turned(_model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return tuple(map(_last, args)), {name: _last(value) for name, value in kwargs.items()}


def _last(value: Any) -> Any:
    # torch defines this layout for four dimensions only.
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    if value.is_floating_point() or value.dtype == torch.uint8:  # uint8 images: see tasks/normalized.py
        return value.contiguous(memory_format=torch.channels_last)
    return value
