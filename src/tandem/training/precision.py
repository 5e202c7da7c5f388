"""What `--precision` means for a forward pass, in training, in evaluation and where FLOPs are counted."""

import logging
from contextlib import AbstractContextManager, nullcontext

import torch

from tandem.distributed.group import ProcessGroup

log = logging.getLogger("tandem.run")

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """torch's autocast for bf16 and fp16; nothing for fp32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()


def precision_of(wanted: str, world: ProcessGroup) -> str:
    """What `auto` means here, said once: bf16 where every rank's GPU computes in it, else fp32.

    Anything else is as it is wanted. All ranks call it.
    """
    if wanted != "auto":
        return wanted
    has = world.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    found = "fp32" if world.sum([float(not has)])[0] else "bf16"
    if world.is_first:
        why = "all ranks support bf16" if found == "bf16" else "not every rank has a GPU that supports bf16"
        log.info("--precision auto: %s, %s", found, why)
    return found
