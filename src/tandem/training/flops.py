"""Count the model's floating-point operations once, and look up or measure the device's peak."""

import logging
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from tandem.errors import ConfigError
from tandem.log import reporting

log = logging.getLogger("tandem.run")

# Dense peaks from NVIDIA's data sheets in TFLOP/s: fp32, TF32 (0: not supported), and bf16 or fp16 with fp32
# sums. The key is the whole name without the brand, because variants of one chip differ by half. A MIG slice
# has a longer name, so it gets no peak.
GPU_PEAKS = {
    "B300": (77, 1125, 2250),
    "B200": (80, 1125, 2250),
    "GB200": (80, 1250, 2500),
    "H200": (67, 494, 989),
    "H200 NVL": (60, 418, 835),
    "GH200 480GB": (67, 494, 989),
    "H100 80GB HBM3": (67, 494, 989),
    "H100 NVL": (60, 418, 835),
    "H100 PCIe": (51, 378, 756),
    "H800": (67, 494, 989),
    "H800 PCIe": (51, 378, 756),
    "H20": (44, 74, 148),
    "A100-SXM4-40GB": (19.5, 156, 312),
    "A100-SXM4-80GB": (19.5, 156, 312),
    "A100-PCIE-40GB": (19.5, 156, 312),
    "A100 80GB PCIe": (19.5, 156, 312),
    "A800-SXM4-40GB": (19.5, 156, 312),
    "A800-SXM4-80GB": (19.5, 156, 312),
    "A800 80GB PCIe": (19.5, 156, 312),
    "A40": (37.4, 74.8, 149.7),
    "A30": (10.3, 82, 165),
    "A10G": (31.2, 35, 70),
    "A10": (31.2, 62.5, 125),
    "L40S": (91.6, 183, 362),
    "L40": (90.5, 90.5, 181),
    "L4": (30.3, 60, 121),
    "V100-SXM2-16GB": (15.7, 0, 125),
    "V100-SXM2-32GB": (15.7, 0, 125),
    "V100-PCIE-16GB": (14, 0, 112),
    "V100-PCIE-32GB": (14, 0, 112),
    "T4": (8.1, 0, 65),
    "RTX 5090": (104.8, 104.8, 209.5),
    "RTX 4090": (82.6, 82.6, 165),
    "RTX 3090": (35.6, 35.6, 71),
}
BRANDS = ("NVIDIA ", "GeForce ", "Tesla ")
PRODUCT_SIZE = 512
PRODUCT_TRIES = 5


def flops_of(forward_and_backward: Callable[[], None]) -> int:
    """Return the FLOPs of matrix products and convolutions in a call as torch counts them, else 0."""
    try:
        with FlopCounterMode(display=False) as counter:
            forward_and_backward()
        return int(counter.get_total_flops())
    # This is an error of the task, not of the counter.
    except ConfigError:
        raise
    # A missing count must not fail a run: the counter may not support every task.
    except Exception as error:
        log.info("cannot count FLOPs (%s); no MFU will be reported", type(error).__name__)
        return 0


def peak_flops(device: torch.device, precision: str, convolves: bool = False) -> float:
    """Return the peak FLOP/s of this rank's device, or 0.0 if unknown.

    The source is data sheets for GPUs, and a measurement for CPUs. fp32 counts as TF32 if torch computes in
    it: matrix products if that is enabled, convolutions (`convolves`) unless it is disabled.
    """
    if device.type != "cuda":
        return _measured_peak()
    name = torch.cuda.get_device_name(device)
    for brand in BRANDS:
        name = name.removeprefix(brand)
    fp32, tf32, half = GPU_PEAKS.get(name, (0, 0, 0))
    if precision != "fp32":
        return half * 1e12
    in_tf32 = _products_in_tf32() or (convolves and _convolutions_in_tf32())
    return (tf32 or fp32 if in_tf32 else fp32) * 1e12


def _products_in_tf32() -> bool:
    """Return whether fp32 matrices are multiplied in TF32, according to either of torch's settings.

    The older setting raises if a task has used torch 2.9's.
    """
    try:
        return torch.get_float32_matmul_precision() != "highest"
    except RuntimeError:
        return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def _convolutions_in_tf32() -> bool:
    try:
        return bool(torch.backends.cudnn.allow_tf32)
    except RuntimeError:
        return bool(torch.backends.cudnn.conv.fp32_precision == "tf32")  # type: ignore[attr-defined,unused-ignore]


def convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules())


def _measured_peak() -> float:
    """Return the best rate of five 512x512 fp32 matrix products (about 10 ms in total on one core)."""
    left = torch.ones(PRODUCT_SIZE, PRODUCT_SIZE)
    best = float("inf")
    for _ in range(PRODUCT_TRIES):
        began = time.perf_counter()
        torch.mm(left, left)
        # The first product also starts threads, and other load can only slow a product down.
        best = min(best, time.perf_counter() - began)
    # A product of n x n matrices takes n**3 multiplications and as many additions.
    return float(2 * PRODUCT_SIZE**3 / best)


# Implement `--profile START:STEPS`: record a window of steps with torch.profiler, for chrome://tracing.


def profiled(
    batches: Iterator[Any], window: str | None, first_step: int, path: Path
) -> Generator[Any, None, None]:
    """Yield `batches` (one item per step), and record the steps of the window to `path`.

    A step lasts from its batch to the request for the next one, or until `close`, which a run calls if it
    ends or stops inside the window. Without a `window`, nothing is recorded.
    """
    if window is None:
        yield from batches
        return
    start, steps = map(int, window.split(":"))
    recording: Any = None
    try:
        for step, batch in enumerate(batches, first_step):
            # A run that resumes inside the window records the rest of it.
            if step == max(start, first_step) and step < start + steps:
                recording = profile()
                recording.__enter__()
            yield batch
            if recording is not None and step + 1 >= start + steps:
                _finish(recording, path)
                recording = None
    finally:
        if recording is not None:
            _finish(recording, path)


def _finish(recording: Any, path: Path) -> None:
    recording.__exit__(None, None, None)
    with reporting(f"write the profile {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        recording.export_chrome_trace(str(path))
        log.info("profile written to %s", path)
