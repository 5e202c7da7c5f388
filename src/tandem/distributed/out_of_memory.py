"""Detect that a rank ran out of memory, and tell all agents which micro-batch to try next.

The rank that ran out of memory writes a note (see `restart_notes`). Two ranks write the same sizes, because
all ranks know all shares.
"""

import re
from dataclasses import dataclass
from typing import Any

import torch

from tandem.distributed.peers import chain
from tandem.distributed.restart_notes import read, write
from tandem.errors import text_of

KEY = "tandem/out-of-memory"
WORDS = re.compile(
    r"CUDA (driver )?error: out of memory|CUDA out of memory|Cuda failure (\d+ )?'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
"""The texts of torch's allocators and of NCCL. Since torch 2.5, most have the type OutOfMemoryError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error`, or any of its causes or contexts, is a failed allocation of torch."""
    return any(
        isinstance(each, torch.OutOfMemoryError)
        or (isinstance(each, RuntimeError) and WORDS.search(text_of(each)) is not None)
        for each in chain(error)
    )


@dataclass(frozen=True)
class OutOfMemory:
    """A rank of the generation at `prefix` ran out of memory with micro-batches of `samples`.

    The next generation uses micro-batches of at most `fits`.
    """

    prefix: str
    rank: int
    node: int
    samples: int
    fits: int

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on node {self.node} ran out of memory with micro-batches of {self.samples}, "
            f"so all ranks use {self.fits}"
        )

    def write(self, store: Any) -> None:
        """Write it to the agents' store. Raises RuntimeError."""
        write(store, KEY, self)


def newest_in(store: Any) -> OutOfMemory | None:
    """Return what a rank of this or an earlier generation has written to the agents' store, if any has."""
    found = read(store, KEY, OutOfMemory)
    return found if found is not None and 0 < found.fits < found.samples else None
