"""Memory of the host that CUDA knows, so that copies from a GPU run by themselves.

torch's own pinned memory is rounded up to a power of two, tensor by tensor: up to twice the state.
"""

import torch
from torch import Tensor

ALIGNMENT = 64


class Pinned:
    """One piece of memory at a time; without CUDA's consent copies run all the same, and the host waits."""

    def __init__(self) -> None:
        self._address = 0

    def hold(self, memory: Tensor) -> None:
        """Pin `memory`, which whoever calls keeps, instead of the piece before; the same again is nothing."""
        address = memory.data_ptr()
        if address == self._address:
            return
        self.release()
        torch.cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)  # type: ignore[no-untyped-call]
        self._address = address

    def release(self) -> None:
        """To be called before the piece's memory goes."""
        if self._address:
            torch.cuda.cudart().cudaHostUnregister(self._address)  # type: ignore[no-untyped-call]
        self._address = 0


def homes_in_one_piece(sources: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """(memory, tensors in it of the forms of `sources`), one behind the other.

    Each is a storage of its own, as torch.save wants it where types differ.
    """
    offsets, end = [], 0
    for source in sources:
        offsets.append(end)
        end += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
    memory = bytearray(max(end, ALIGNMENT))
    homes = [
        torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=begin).reshape(source.shape)
        if source.numel()
        else torch.empty(source.shape, dtype=source.dtype)
        for begin, source in zip(offsets, sources, strict=True)
    ]
    return torch.frombuffer(memory, dtype=torch.uint8), homes
