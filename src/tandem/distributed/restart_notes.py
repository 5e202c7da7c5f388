"""Tell all agents why ranks exit together, and what the next generation must do differently.

A rank writes to the agents' store before it exits. An agent whose ranks lose it as a peer can therefore read
the reason there.
"""

import contextlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch

from tandem.distributed.peers import chain
from tandem.errors import text_of
from tandem.telemetry.messages import checked
from tandem.torch_private import without_prefixes

Note = TypeVar("Note")
WORDS = re.compile(
    r"CUDA (driver )?error: out of memory|CUDA out of memory|Cuda failure (\d+ )?'out of memory'"
    r"|DefaultCPUAllocator: (can't allocate|not enough) memory"
)
"""The texts of torch's allocators and of NCCL. Since torch 2.5, most have the type OutOfMemoryError."""


@dataclass(frozen=True)
class WrongNode:
    """Ranks on `node` of the generation at `prefix` computed wrongly; `why` names them."""

    prefix: str
    node: int
    why: str

    def __str__(self) -> str:
        return self.why


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

    The next generation uses micro-batches of at most `fits`. Two ranks write the same sizes, because all
    ranks know all shares.
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


KEYS: dict[type, str] = {WrongNode: "tandem/wrong-node", OutOfMemory: "tandem/out-of-memory"}


def write(store: Any, note: WrongNode | OutOfMemory) -> None:
    """Write a note, which is in the agents' store once this returns. Raises RuntimeError."""
    store = without_prefixes(store)
    key = KEYS[type(note)]
    store.set(key, json.dumps(asdict(note)))
    store.check([key])  # a set has no answer, and this rank exits next


def read(store: Any, kind: type[Note]) -> Note | None:
    """Return the note that a rank of this or an earlier generation has written, if any."""
    with contextlib.suppress(RuntimeError, ValueError, RecursionError):  # any client can write there
        if store.check([KEYS[kind]]):
            return checked(kind, json.loads(store.get(KEYS[kind])))
    return None


def newest_in(store: Any) -> OutOfMemory | None:
    """Return the newest note about memory in the agents' store, of this or an earlier generation, if any."""
    found = read(store, OutOfMemory)
    return found if found is not None and 0 < found.fits < found.samples else None
