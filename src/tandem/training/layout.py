"""`--channels-last`: how pictures lie in memory, so that tensor cores read them as they are."""

from typing import Any

import torch
from torch import Tensor, nn

from tandem.errors import ConfigError


def lay_out(model: nn.Module, channels_last: bool, shares: str = "") -> None:
    """With `channels_last`, weights [out, in, height, width] and the model's inputs of that form, in place.

    Values and shapes stay; a checkpoint of one layout is one of the other. `shares`: the flag that shares the
    parameters out, if one does: rows of what lies in order. Raises ConfigError for it.
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
    if not isinstance(value, Tensor) or value.dim() != 4:
        return value
    if value.is_floating_point() or value.dtype == torch.uint8:  # bytes: see tasks/normalised.py
        return value.contiguous(memory_format=torch.channels_last)
    return value
