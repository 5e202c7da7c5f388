"""Memory of the host that CUDA knows, so that copies from a GPU run by themselves.

torch's own pinned memory is rounded up to a power of two, tensor by tensor: up to twice the state.
"""

import logging
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger("tandem.run")

ALIGNMENT = 64


class Pinned:
    """One piece of memory at a time; without CUDA's consent copies run all the same, and the host waits."""

    def __init__(self) -> None:
        self._held = (0, 0)  # address, bytes
        self._is_refused = False

    def hold(self, memory: Tensor) -> None:
        """Pin `memory`, which whoever calls keeps, instead of the piece before; the same again is nothing."""
        wanted = (memory.data_ptr(), memory.nbytes)
        if wanted == self._held or self._is_refused:
            return
        self.release()
        result = int(torch.cuda.cudart().cudaHostRegister(*wanted, 0))  # type: ignore[no-untyped-call]
        if result == 0:
            self._held = wanted
            return
        self._is_refused = True
        log.warning(
            "CUDA cannot pin %.2f GiB of host memory (error %d): copies from the GPU will delay steps; raise "
            "the limit on locked memory (ulimit -l unlimited), or add memory",
            *(memory.nbytes / 2**30, result),
        )
        with suppress(RuntimeError):  # the error is kept, and would be raised for the next kernel of anybody
            torch.ones(1, device="cuda")

    def release(self) -> None:
        """To be called before the piece's memory goes."""
        if self._held[0]:
            torch.cuda.cudart().cudaHostUnregister(self._held[0])  # type: ignore[no-untyped-call]
        self._held = (0, 0)


def streams_of(sources: list[Tensor]) -> list[torch.cuda.Stream]:
    """Those on which copies from `sources` run: one for each of their GPUs."""
    devices = {source.device for source in sources if source.is_cuda}
    return [torch.cuda.current_stream(device) for device in devices]


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
