"""The limit for ranks that have met to connect to each other, and who is named when it is over.

NCCL's first communicator has no limit of its own: with an interface that does not reach the others it waits
for ever in C, where no exception comes through. So a thread watches, and ends the process.
"""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

from tandem.distributed.meeting import open_store
from tandem.distributed.position import Position
from tandem.errors import PEER_LOST
from tandem.timeouts import LEAVE_SECONDS

log = logging.getLogger("tandem.run")

COMES, CONNECTS, CONNECTED = "not begun", "begun, but not done", "done"
LIBRARIES = {"cuda": "NCCL", "cpu": "gloo"}
MOST_NAMES = 4


@contextmanager
def limited(store: Any, position: Position, kind: str, seconds: float) -> Iterator[None]:
    """Inside, this rank connects to the others; after `seconds` one line says who is missing, and the process
    ends with 200."""
    over = threading.Event()

    def end() -> None:
        if not over.wait(seconds):
            log.error("%s", complaint(position, kind, seconds, states(position)))
            os._exit(PEER_LOST)

    store.set(_key(position.rank), CONNECTS)
    threading.Thread(target=end, name="tandem-connecting", daemon=True).start()
    try:
        yield
    finally:
        over.set()
    store.set(_key(position.rank), CONNECTED)


def announce(store: Any, position: Position) -> None:
    """Before the ranks meet: who this is, and that it has not begun to connect."""
    store.set(f"connecting/name/{position.rank}", _name(position))
    store.set(_key(position.rank), COMES)


def states(position: Position) -> list[tuple[str, str]]:
    """(A rank's name, how far it is), of all ranks but this one; empty where the store does not answer.

    Asked by a connection of its own: the rank's own may be in use by what waits.
    """
    others = [rank for rank in range(position.world_size) if rank != position.rank]
    try:
        store = open_store(replace(position, rank=position.rank or 1), timedelta(seconds=LEAVE_SECONDS))
        keys = [key for rank in others for key in (f"connecting/name/{rank}", _key(rank))]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    except (RuntimeError, OSError, ValueError):
        return []
    words = [word.decode() for word in found]
    return list(zip(words[::2], words[1::2], strict=True))


def complaint(position: Position, kind: str, seconds: float, others: list[tuple[str, str]]) -> str:
    """The line: who waits, for whom, and where to look."""
    library = LIBRARIES[kind]
    variable = f"{library.upper()}_SOCKET_IFNAME"
    interface = os.environ.get(variable)
    said = f"{library} has not connected the {position.world_size} ranks within {seconds:g} s"
    here = f"{_name(position)} waits"
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
    return f"{said}: {here}; {remedy}"


def _name(position: Position) -> str:
    return f"rank {position.rank} on node {position.node_rank} ({position.node_name})"


def _key(rank: int) -> str:
    return f"connecting/{rank}"
