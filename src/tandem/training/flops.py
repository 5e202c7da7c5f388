"""Floating point operations: of the model, counted once, and what the device can do."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")

# Dense peak of the maker's data sheets, in FLOP/s: (fp32 without TF32, bf16 and fp16 tensor cores).
# The longest name that is part of the device's name counts.
GPU_PEAKS = {
    "B200": (80e12, 2250e12),
    "H200": (67e12, 989e12),
    "H100 PCIe": (51e12, 756e12),
    "H100 NVL": (60e12, 835e12),
    "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12),
    "A10G": (31.2e12, 70e12),
    "A10": (31.2e12, 125e12),
    "L40S": (91.6e12, 362e12),
    "L4": (30.3e12, 121e12),
    "V100": (15.7e12, 125e12),
    "T4": (8.1e12, 65e12),
    "RTX 4090": (82.6e12, 165e12),
    "RTX 3090": (35.6e12, 71e12),
}
PRODUCT_SIZE = 512
PRODUCT_TRIES = 5


def flops_of(forward_and_backward: Callable[[], None]) -> int:
    """FLOPs of what is called, matrix products and convolutions, as torch counts them; 0 if it cannot."""
    try:
        with FlopCounterMode(display=False) as counter:
            forward_and_backward()
        return int(counter.get_total_flops())
    except ConfigError:
        raise
    except Exception as error:  # a count is not worth a run: a task may do what the counter cannot follow
        log.info("FLOPs cannot be counted (%s); there is no MFU", type(error).__name__)
        return 0


def peak_flops(device: torch.device, precision: str) -> float:
    """FLOP/s that this rank's device can do: data sheets for GPUs, measured for CPUs; 0.0 if unknown."""
    if device.type != "cuda":
        return _measured_peak()
    name = torch.cuda.get_device_name(device)
    known = [key for key in GPU_PEAKS if key in name]
    return GPU_PEAKS[max(known, key=len)][precision != "fp32"] if known else 0.0


def _measured_peak() -> float:
    """The best of five products of 512x512 fp32 matrices (about 10 ms in all on one core)."""
    left = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    best = float("inf")
    for _ in range(PRODUCT_TRIES):
        began = time.perf_counter()
        torch.mm(left, left)
        best = min(best, time.perf_counter() - began)
    return float(2 * PRODUCT_SIZE**3 / best)


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Put the model's buffers (running statistics) back afterwards."""
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, old in zip(model.buffers(), before, strict=True):
                buffer.copy_(old)
