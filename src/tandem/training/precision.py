"""What `--precision` means for a forward pass, in training, in evaluation and where FLOPs are counted."""

from contextlib import AbstractContextManager, nullcontext

import torch

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """torch's autocast for bf16 and fp16; nothing for fp32."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext()
