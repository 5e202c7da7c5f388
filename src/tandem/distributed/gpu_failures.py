"""Has a GPU failed in a way that a new process may mend? Read from CUDA's error codes, else from its words.

After any of them the process cannot use its GPU again: its context is lost. A device assert is an index or a
label out of range, and comes back; so does memory that is too small for the batch. Those are the task's.
"""

import re

import torch

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
    r"(CUDA error: |CUDA driver error: |Cuda failure (\d+ )?')"
    r"(CUDA-capable device\(s\) is/are busy or unavailable|uncorrectable |an illegal memory access"
    r"|the launch timed out|hardware stack error|an illegal instruction|misaligned address"
    r"|invalid program counter|unspecified launch failure|system not yet initialized|unknown error"
    r"|invalid/unsupported operation due to|contained error)"
)
"""As torch says them, and as NCCL hands them on: "Cuda failure 719 'unspecified launch failure'"."""


def is_gpu_failure(error: BaseException) -> bool:
    """Whether `error`, of CUDA or handed on by NCCL, says that this rank's own GPU has failed."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and isinstance(error, getattr(torch, "AcceleratorError", RuntimeError)):
        return code in CODES
    return isinstance(error, RuntimeError) and WORDS.search(str(error)) is not None
