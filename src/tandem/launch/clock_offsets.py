"""Measure by how much the clocks of other nodes differ from node 0's, through the agents' store.

As in NTP: node 0 asks, the other node answers with its time, and the answer counts as given halfway between
question and arrival. The store is on node 0, so a round takes one trip to the other node and back.
"""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

ROUNDS = 8
"""The quickest of them counts: a busy machine delays some."""
FIRST_SECONDS = 5.0
"""For the first answer: the other node reads its request five times a second."""


class Offset(NamedTuple):
    """How many nanoseconds a node's clock is ahead of node 0's, and by how much that may be wrong."""

    ahead: int
    uncertainty: int


def measure(store: Any, prefix: str, clock: Callable[[], int] = time.time_ns) -> Offset | None:
    """Measure one node's clock from node 0; `prefix` is the request's and the node's part of the store.

    Returns None if the node does not answer.
    """
    best: Offset | None = None
    try:
        for number in range(ROUNDS):
            asked = clock()
            store.set(f"{prefix}/asked/{number}", "")
            key = f"{prefix}/answer/{number}"
            store.wait([key], timedelta(seconds=FIRST_SECONDS))
            theirs = int(store.get(key))
            now = clock()
            found = Offset(theirs - (asked + now) // 2, (now - asked) // 2)
            best = found if best is None or found.uncertainty < best.uncertainty else best
            store.delete_key(key)
    except (RuntimeError, ValueError):
        return best
    # A difference that the measurement cannot tell from none is none: nodes on one machine share a clock.
    return Offset(0, best.uncertainty) if best and abs(best.ahead) <= best.uncertainty else best


def answer(store: Any, prefix: str, clock: Callable[[], int] = time.time_ns) -> None:
    """Answer node 0's rounds. Raises RuntimeError if node 0 does not ask."""
    for number in range(ROUNDS):
        key = f"{prefix}/asked/{number}"
        store.wait([key], timedelta(seconds=FIRST_SECONDS))
        store.set(f"{prefix}/answer/{number}", str(clock()))
        store.delete_key(key)
