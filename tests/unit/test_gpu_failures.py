"""Which CUDA errors a new process may fix, by code and by words; what a rank ends with then."""

from typing import Any

import pytest
import torch

from needs import require
from tandem.distributed.peers import CODES, is_gpu_failure, is_peer_loss
from tandem.errors import FAILED, GPU_FAILED, PEER_LOST, is_retried
from tandem.launch.script_process import code_of
from tandem.script.rank import gpu_has_failed
from tandem.text import in_one_line

MENDED = [
    "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: unspecified launch failure",
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUDA-capable device(s) is/are busy or unavailable",
    "CUDA error: the launch timed out and was terminated",
    "NCCL error in: ProcessGroupNCCL.cpp:1, unhandled cuda error\nncclUnhandledCudaError: Call to CUDA "
    "function failed.\nLast error:\nCuda failure 719 'unspecified launch failure'",
]
FINAL = [
    "CUDA error: device-side assert triggered",
    "CUDA error: no kernel image is available for execution on the device",
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139 GiB",
    "The NVIDIA driver on your system is too old (found version 12040)",
    "an illegal memory access was encountered, says the task",
]


@pytest.mark.parametrize("text", MENDED)
def test_what_a_new_process_may_mend_is_started_again(text: str) -> None:
    error = RuntimeError(text)
    assert is_gpu_failure(error) and gpu_has_failed(error)
    assert code_of(error, 1) == code_of(error, 2) == GPU_FAILED and is_retried(GPU_FAILED)


@pytest.mark.parametrize("text", FINAL)
def test_what_comes_back_is_the_tasks(text: str) -> None:
    assert not is_gpu_failure(RuntimeError(text)) and code_of(RuntimeError(text), 2) == FAILED


def coded(code: int) -> Any:
    """torch's error with CUDA's code, whose words may be in any language of a driver."""
    error = torch.AcceleratorError("CUDA error: (a driver's own words)")
    error.error_code = code  # type: ignore[attr-defined]
    return error


def test_codes_count_more_than_words() -> None:
    require("torch.AcceleratorError", hasattr(torch, "AcceleratorError"), "torch 2.6 has the words alone")
    assert all(is_gpu_failure(coded(code)) for code in CODES)
    assert not is_gpu_failure(coded(710)) and not is_gpu_failure(coded(2))  # device assert, out of memory


def test_an_error_of_nccl_alone_is_a_lost_peer_and_said_whole() -> None:
    error = torch.distributed.DistBackendError(
        "NCCL error in: NCCLUtils.cpp:77, remote process exited or there was a network error\n"
        "ncclRemoteError: A call failed.\nLast error:\nsocketProgress: Connection closed by remote peer"
    )
    assert not is_gpu_failure(error) and is_peer_loss(error, 2) and code_of(error, 2) == PEER_LOST
    assert in_one_line(error).endswith("Last error:; socketProgress: Connection closed by remote peer")
    assert "\n" not in in_one_line(error) and in_one_line(RuntimeError()) == "RuntimeError"
