"""Host memory for copies of tensors, in one piece and pinned, so that copies from a GPU are asynchronous.

torch rounds its own pinned memory up to a power of two for each tensor, which can need twice the state's
size.
"""

import logging
from contextlib import suppress

import torch
from torch import Tensor

log = logging.getLogger("tandem.run")

ALIGNMENT = 64


class Pinned:
    """Pins one piece of memory at a time. If CUDA refuses, copies still work, but block the host."""

    def __init__(self) -> None:
        self._held = (0, 0)  # address, bytes
        self._is_refused = False

    def hold(self, memory: Tensor) -> None:
        """Pin `memory` (which the caller keeps alive) and unpin the previous piece.

        The same memory is pinned once.
        """
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
            memory.nbytes / 2**30,
            result,
        )
        # CUDA keeps the error and would raise it at the next kernel launch, wherever that is.
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")

    def release(self) -> None:
        """Unpin the memory. Call this before the memory is freed."""
        if self._held[0]:
            torch.cuda.cudart().cudaHostUnregister(self._held[0])  # type: ignore[no-untyped-call]
        self._held = (0, 0)


def streams_of(sources: list[Tensor]) -> list[torch.cuda.Stream]:
    """Return the current stream of each GPU that `sources` are on; copies run on these."""
    devices = {source.device for source in sources if source.is_cuda}
    return [torch.cuda.current_stream(device) for device in devices]


def contiguous_copies(sources: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return (memory, tensors in it with the shapes and dtypes of `sources`), laid out one after another.

    Each tensor has its own storage, because torch.save requires that for views with different dtypes.
    """
    offsets = []
    end = 0
    for source in sources:
        offsets.append(end)
        end += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
    # torch.frombuffer accepts neither an empty buffer nor zero elements.
    memory = bytearray(max(end, ALIGNMENT))
    copies = [
        torch.frombuffer(memory, dtype=source.dtype, count=source.numel(), offset=begin).reshape(source.shape)
        if source.numel()
        else torch.empty(source.shape, dtype=source.dtype)
        for begin, source in zip(offsets, sources, strict=True)
    ]
    return torch.frombuffer(memory, dtype=torch.uint8), copies
