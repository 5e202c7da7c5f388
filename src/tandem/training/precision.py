"""Apply `--precision` to forward passes in training, evaluation and FLOP counts."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.distributed.group import ProcessGroup

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
