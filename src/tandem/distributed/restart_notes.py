"""Tell all agents why ranks exit together, and what the next generation must do differently.

A rank writes to the agents' store before it exits. An agent whose ranks lose it as a peer can therefore read
there why.
"""

import contextlib
import json
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from tandem.telemetry.messages import checked
from tandem.torch_private import without_prefixes

Note = TypeVar("Note")
WRONG_NODE = "tandem/wrong-node"


@dataclass(frozen=True)
class WrongNode:
    """Ranks on `node` of the generation at `prefix` computed wrongly; `why` names them."""

    prefix: str
    node: int
    why: str

    def __str__(self) -> str:
        return self.why

    def write(self, store: Any) -> None:
        """Write it to the agents' store. Raises RuntimeError."""
        write(store, WRONG_NODE, self)


def write(store: Any, key: str, note: Any) -> None:
    """Write a note, a dataclass, which is in the store once this returns. Raises RuntimeError."""
    store = without_prefixes(store)
    store.set(key, json.dumps(asdict(note)))
    store.check([key])  # a set has no answer, and this rank exits next


def read(store: Any, key: str, kind: type[Note]) -> Note | None:
    """Return what a rank of this or an earlier generation has written, if any has."""
    with contextlib.suppress(RuntimeError, ValueError, RecursionError):  # any client can write there
        if store.check([key]):
            return checked(kind, json.loads(store.get(key)))
    return None
