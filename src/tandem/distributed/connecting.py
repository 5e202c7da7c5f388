"""Limit how long ranks may take to connect to each other, and report who is missing.

NCCL's first communicator has no time limit. With a network interface that does not reach the others, it waits
forever in C code, which no exception can interrupt. Therefore a thread watches it, and ends the process.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tandem.distributed.group_store import open_store
from tandem.distributed.position import Position
from tandem.errors import PEER_LOST
from tandem.timeouts import LEAVE_SECONDS

log = logging.getLogger("tandem.run")

COMES = "not begun"
CONNECTS = "begun, but not done"
CONNECTED = "done"
LIBRARIES = {"cuda": "NCCL", "cpu": "gloo"}
MOST_NAMES = 4


@contextmanager
def limited(store: Any, position: Position, kind: str, seconds: float) -> Iterator[None]:
    """Limit the time in which this rank connects to the others inside the block.

    After `seconds`, log one line that says who is missing, and end the process with 200.
    """
    over = threading.Event()

    def end() -> None:
        if not over.wait(seconds):
            log.error("%s", timeout_message(position, kind, seconds, states(position)))
            # An exception would end only this thread, and the main thread may be blocked in C.
            os._exit(PEER_LOST)

    store.set(_key(position.rank), CONNECTS)
    threading.Thread(target=end, name="tandem-connecting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
    # This is not in `finally`, because a rank that failed has not connected.
    store.set(_key(position.rank), CONNECTED)


def announce(store: Any, position: Position) -> None:
    """Store this rank's name and that it has not started to connect; called before the ranks meet."""
    store.set(f"connecting/name/{position.rank}", _name(position))
    store.set(_key(position.rank), COMES)


def states(position: Position) -> list[tuple[str, str]]:
    """Return (name, state) of all other ranks; empty if the store does not answer.

    It uses a new connection, because the blocked thread may hold the rank's own.
    """
    others = [rank for rank in range(position.world_size) if rank != position.rank]
    try:
        # Any rank but 0 connects as a client; rank 0 may host the store in this process.
        store = open_store(replace(position, rank=position.rank or 1), timedelta(seconds=LEAVE_SECONDS))
        keys = [key for rank in others for key in (f"connecting/name/{rank}", _key(rank))]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    # The store may be gone with rank 0. The message helps without the names, too.
    except (RuntimeError, OSError, ValueError):
        return []
    words = [word.decode() for word in found]
    return list(zip(words[::2], words[1::2], strict=True))


def timeout_message(position: Position, kind: str, seconds: float, others: list[tuple[str, str]]) -> str:
    """Return the message: who waits, for whom, and where to look."""
    library = LIBRARIES[kind]
    variable = f"{library.upper()}_SOCKET_IFNAME"
    interface = os.environ.get(variable)
    message = f"{library} has not connected the {position.world_size} ranks within {seconds:g} s"
    here = f"{_name(position)} waits"
    # Ranks that have not begun come first, because the others may be waiting for them.
    for state in (COMES, CONNECTS):
        names = [name for name, each in others if each == state]
        if names:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            here += f"; {state}: {', '.join(names[:MOST_NAMES])}{more}"
    if any(state == COMES for _, state in others):
        remedy = "see the log of that rank, or raise --master-timeout"
    else:
        is_set = f"is {interface}" if interface else "is not set"
        remedy = f"{variable} {is_set}; set it to the network interface that reaches the other nodes"
        if kind == "cuda":
            remedy += "; set NCCL_DEBUG=INFO to see what NCCL tries"
    return f"{message}: {here}; {remedy}"


def _name(position: Position) -> str:
    return f"rank {position.rank} on node {position.node_rank} ({position.node_name})"


def _key(rank: int) -> str:
    return f"connecting/{rank}"
