"""Detect GPU failures that a new process may fix, from CUDA's error codes or its messages.

After such a failure, the process cannot use its GPU again, because its context is lost. A device assert (an
index or label out of range) would recur, and so would a lack of memory for the batch. Those are errors of the
task.
"""

import re

import torch

from tandem.errors import text_of

CODES = {
    46: "devices unavailable",
    214: "uncorrectable ECC error",
    220: "uncorrectable NVLink error",
    226: "contained error",
    700: "illegal memory access",
    702: "launch timed out",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    718: "invalid program counter",
    719: "launch failure",
    802: "system not ready",
    999: "unknown error",
}
"""cudaError_t of CUDA 12 and 13 (driver_types.h)."""
WORDS = re.compile(
    r"(CUDA error: |CUDA driver error: |Cuda failure (\d+ )?'|from cudaGetDeviceCount\(\)\. .*Error \d+: )"
    r"(CUDA-capable device\(s\) is/are busy or unavailable|uncorrectable |an illegal memory access"
    r"|the launch timed out|hardware stack error|an illegal instruction|misaligned address"
    r"|invalid program counter|unspecified launch failure|system not yet initialized|unknown error"
    r"|invalid/unsupported operation due to|contained error)"
)
"""Messages as torch raises them, also when CUDA starts, and as NCCL passes them on.

An example of the latter is "Cuda failure 719 'unspecified launch failure'".
"""
REFUSES = re.compile(
    r"CUDA error: |CUDA driver error: |CUDA out of memory|The NVIDIA driver |Unexpected error from cuda"
)
"""How CUDA's own errors begin when torch raises them."""


def is_of_cuda(error: BaseException) -> bool:
    """Return True if `error` is from CUDA itself, whether a GPU failure or an invalid request."""
    # Older versions of torch have no AcceleratorError and raise a RuntimeError.
    kinds = getattr(torch, "AcceleratorError", torch.OutOfMemoryError), torch.OutOfMemoryError
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and bool(REFUSES.match(text_of(error)))
    )


def is_gpu_failure(error: BaseException) -> bool:
    """Return True if `error`, from CUDA or passed on by NCCL, means that this rank's own GPU has failed."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and isinstance(error, getattr(torch, "AcceleratorError", RuntimeError)):
        return code in CODES
    return isinstance(error, RuntimeError) and WORDS.search(text_of(error)) is not None
