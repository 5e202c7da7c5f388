"""Apply `--precision` to forward passes in training, evaluation and FLOP counts."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return torch's autocast for bf16 and fp16, and a null context for fp32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()


def precision_of(wanted: str, world: ProcessGroup) -> str:
    """Resolve `auto` and log it: bf16 if every rank's GPU supports it natively, else fp32.

    Returns any other value unchanged. All ranks call this.
    """
    if wanted != "auto":
        return wanted
    # Older GPUs only emulate bf16, which is slower than fp32.
    has = world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    # Ranks average their gradients, so all of them use one precision.
    found = "fp32" if world.sum([float(not has)])[0] else "bf16"
    if world.is_first:
        why = "all ranks support bf16" if found == "bf16" else "not every rank has a GPU that supports bf16"
        log.info("--precision auto: %s, %s", found, why)
    return found


# Implement `--channels-last`: the memory layout of images that tensor cores read without a conversion.


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
