"""How a loader process sends a batch: small tensors as bytes, and an error for what cannot be sent."""

import ctypes
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from tandem.errors import ConfigError
from tandem.text import first_line
from tandem.torch_private import worker_failure

MESSAGE_BYTES = 2**16
"""A loader process sends a tensor of up to this size within its message. A larger one becomes a file in
/dev/shm, which takes 0.2 ms longer for small tensors, and less time from about 500 KB on."""
SENT_AS_BYTES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}).union(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
)


def prepare_messages() -> None:
    """Let this loader process send its batches as described above."""
    ForkingPickler.register(Tensor, _reduce_tensor)
    # The queue pickles in a thread. By default it prints an error there, and the rank waits forever.
    Queue._on_queue_feeder_error = _send_failure  # type: ignore[attr-defined]


def _reduce_tensor(tensor: Tensor) -> tuple[Any, ...]:
    """Pickle a small tensor as bytes, and any other as torch does: as an open file in /dev/shm."""
    if tensor.layout is torch.strided and not tensor.is_nested:
        # torch would send the memory of a lazy conjugate or negation, without its sign.
        tensor = tensor.resolve_conj().resolve_neg()
        is_plain = tensor.is_contiguous() and tensor.device.type == "cpu" and not tensor.requires_grad
        if is_plain and tensor.nbytes <= MESSAGE_BYTES and tensor.dtype in SENT_AS_BYTES:
            data = ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
            return _tensor_of_bytes, (data, tensor.dtype, tensor.shape)
    reduced: tuple[Any, ...] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
    return reduced


def _tensor_of_bytes(data: bytes, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    # A bytearray as memory could be aligned to fewer bytes, and a matrix product then has other bits.
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    ctypes.memmove(tensor.data_ptr(), data, len(data))
    return tensor


def _send_failure(queue: "Queue[Any]", error: Exception, sent: tuple[int, Any]) -> None:
    """Send the reason in place of a batch that could not be pickled."""
    # A full /dev/shm is no fault of the batch; the rank explains it.
    if not isinstance(error, OSError | MemoryError) and "shared memory" not in str(error):
        error = ConfigError(
            f"a batch cannot be sent from a loader process: {first_line(error)}; let the dataset and collate "
            "return tensors, numbers and text, in lists, tuples, dicts or dataclasses"
        )
    queue.put((sent[0], worker_failure(error)))
