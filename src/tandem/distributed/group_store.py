"""Connect ranks before their process group opens: the store, and the settings that must be equal for it.

Once the group is open, it compares all settings (`ProcessGroup.check_same_settings`). The backend must be
compared earlier: a rank that opens NCCL and one that opens gloo would wait for each other until a timeout.
`StoreNotices` uses the same store while the group is open.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from tandem.distributed.position import Connection, Position
from tandem.errors import PEER_LOST, ConfigError, PeerLostError
from tandem.paths import volume_time
from tandem.timeouts import LEAVE_SECONDS, MEETING_FILE_SECONDS, RENDEZVOUS_POLL_SECONDS, WAITING_WORD_SECONDS
from tandem.torch_private import listening_at, without_prefixes

log = logging.getLogger("tandem")

SHOWN = 8
KINDS = {"cuda": "has a GPU", "cpu": "has none"}
DUMP_SIGNAL = "exception_dump"
"""A key that NCCL's watchdog sets after an error, without any prefix (torch 2.11: ProcessGroupNCCL.cpp)."""


def listen(host: str, port: int) -> tuple[int, int]:
    """Return (a descriptor that listens only at `host`, its port); port 0 is any free one. Raises OSError.

    torch's store accepts the descriptor and closes it at the end. Without one, it listens on every interface.
    """
    listener = socket.socket()
    try:
        # A restart must not wait for the TIME_WAIT of an earlier store's connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    port = int(listener.getsockname()[1])
    return listener.detach(), port


def connect_store(
    host: str,
    port: int,
    timeout: timedelta,
    patience: float,
    should_stop: Callable[[], bool] = lambda: False,
    log_every: float = WAITING_WORD_SECONDS,
) -> TCPStore:
    """Connect to the store of another process; `timeout` applies to the calls of the store.

    If another program has the port, accepts connections and sends nothing, torch's constructor waits without
    a limit. It therefore runs in a thread, which is then abandoned. Raises PeerLostError after `patience`
    seconds or if `should_stop()` returns True, and the constructor's own errors. The wait is logged every
    `log_every` seconds.
    """
    made: SimpleQueue[TCPStore | BaseException] = SimpleQueue()

    def connect() -> None:
        try:
            made.put(TCPStore(host, port, is_master=False, timeout=timeout))
        # The waiting thread raises it; here it would only print a stack trace.
        except BaseException as error:
            made.put(error)

    threading.Thread(target=connect, name="tandem-store", daemon=True).start()
    began = time.monotonic()
    speaks_at = began + log_every
    while True:
        with contextlib.suppress(Empty):
            store = made.get(timeout=RENDEZVOUS_POLL_SECONDS)
            if isinstance(store, BaseException):
                raise store
            return store
        now = time.monotonic()
        if now - began >= patience or should_stop():
            raise PeerLostError(
                f"{host}:{port} accepts connections, but did not answer as node 0 of this job within "
                f"{now - began:.0f} s; if another program uses this port, choose another: --master HOST:PORT"
            )
        if now >= speaks_at:
            log.info(
                "waiting: %s:%d accepts connections but does not answer as node 0; does another program "
                "use this port? (%.0f of %.0f s)", host, port, now - began, patience,
            )  # fmt: skip
            speaks_at += log_every


def open_store(position: Position, connection: Connection, timeout: timedelta) -> Any:
    """Open the store through which ranks find each other; `timeout` limits waits for other ranks."""
    if connection.store is not None:
        host, port, prefix = connection.store
        return PrefixStore(prefix, TCPStore(host, port, is_master=False, timeout=timeout))
    if connection.init == "alone":
        return HashStore()
    if connection.init == "env":
        return next(rendezvous("env://", timeout=timeout))[0]
    if connection.init.startswith("file:"):
        check_fresh(Path(connection.init.removeprefix("file://")))
        store = next(rendezvous(connection.init, position.rank, position.world_size, timeout=timeout))[0]
        # torch's handler for files ignores the timeout that it gets.
        store.set_timeout(timeout)
        return store
    if connection.master is None:
        raise ValueError("no master is known")
    host, port = connection.master
    is_first = position.rank == 0
    # With one node, other hosts have no reason to connect, so the store listens at the master's address
    # alone.
    here = listen(host, port)[0] if is_first and position.nodes == 1 else None
    patience = timedelta(seconds=connection.patience)
    own: Any
    if is_first:
        # torch's own wait would not report which ranks are missing, so `wait_for_all` waits instead.
        own = TCPStore(
            host, port, is_master=True, timeout=patience, wait_for_workers=False, **listening_at(here)
        )
    else:
        own = connect_store(host, port, patience, connection.patience)
    store = PrefixStore(connection.job, own) if connection.job else own
    wait_for_all(store, position, connection.patience)
    # The patience for late nodes ends here; from here on, the collectives' timeout applies.
    own.set_timeout(timeout)
    return store


def wait_for_all(store: Any, position: Position, patience: float) -> None:
    """Wait until each rank has joined the store on rank 0; every few seconds, report which are missing.

    Raises PeerLostError if they do not join within `patience` seconds.
    """
    size = position.world_size
    began = time.monotonic()
    speaks_at = began + WAITING_WORD_SECONDS
    # Set the key before the count: when the count is complete, no key is missing.
    store.set(f"here/{position.rank}", "")
    count = store.add("here", 1)
    # Poll, because a blocking wait could not report who is missing.
    while count < size:
        time.sleep(RENDEZVOUS_POLL_SECONDS)
        count = store.add("here", 0)
        now = time.monotonic()
        if count >= size or now < min(speaks_at, began + patience):
            continue
        missing = [str(rank) for rank in range(size) if not store.check([f"here/{rank}"])]
        more = f" and {len(missing) - SHOWN} more" if missing[SHOWN:] else ""
        who = f"rank {', '.join(missing[:SHOWN])}{more}"
        if now >= began + patience:
            raise PeerLostError(
                f"not all of the {size} ranks joined within {patience:.0f} s, missing {who}; start "
                "the others, or raise --master-timeout"
            )
        log.info(
            "waiting: %d of %d ranks have joined, missing %s (%.0f of %.0f s)",
            count, size, who, now - began, patience,
        )  # fmt: skip
        speaks_at = now + WAITING_WORD_SECONDS


def check_fresh(path: Path) -> None:
    """Raise ConfigError for a rendezvous file of an earlier run, which has the addresses of its ranks."""
    # A missing file is the usual case.
    with contextlib.suppress(OSError):
        # A new file is written by the ranks of this start, so only its age distinguishes an old one.
        found = path.stat()
        if found.st_size and (age := volume_time(path.parent) - found.st_mtime) > MEETING_FILE_SECONDS:
            raise ConfigError(
                f"--master file://{path}: the file is from an earlier run, {age:.0f} s old; remove it, "
                "or use a new file for each start"
            )


def forget_dump_signal(store: Any) -> None:
    """Delete the signal that an NCCL error of an earlier generation left in a store that outlived it.

    NCCL's watchdogs check it in every later generation: each would dump its record and abort its rank. Rank 0
    calls this before the others can open their group, when all ranks of earlier generations are dead.
    """
    # NCCL's watchdog ignores the prefixes of groups. See docs/architecture.md#how-ranks-connect.
    store = without_prefixes(store)
    if isinstance(store, TCPStore):
        store.delete_key(DUMP_SIGNAL)


def check_same_kind(store: Any, position: Position, kind: str) -> None:
    """Wait for all ranks; raise ConfigError on each if some have a GPU and others have none."""
    here = f"rank {position.rank} on node {position.node_rank} ({position.node_name})"
    # Only the first rank of each kind is stored, for the message.
    store.compare_set(f"kind/{kind}", "", here)
    # The last rank releases the others, which wait in a single request instead of polling.
    if store.add("kind/arrived", 1) >= position.world_size:
        store.set("kind/all", "1")
    store.wait(["kind/all"])
    if all(store.check([f"kind/{each}"]) for each in KINDS):
        kinds = " and ".join(f"{store.get(f'kind/{each}').decode()} {what}" for each, what in KINDS.items())
        if store.add("kind/told", 1) >= position.world_size:
            store.set("kind/all told", "1")
        if position.rank == 0:  # the store may be in rank 0's process, so it must stay until all have read it
            with contextlib.suppress(RuntimeError):
                store.wait(["kind/all told"], timedelta(seconds=LEAVE_SECONDS))
        raise ConfigError(
            f"{kinds}, but all ranks need the same kind of device; use --device cpu, or leave out the nodes "
            "without a GPU"
        )


# Limit how long ranks may take to connect to each other, and report which are missing.
#
# NCCL's first communicator has no time limit. With a network interface that does not reach the others, it
# waits forever in C code, which no exception can interrupt. Therefore a thread watches it, and ends the
# process.

COMES = "not begun"
CONNECTS = "begun, but not done"
CONNECTED = "done"
LIBRARIES = {"cuda": "NCCL", "cpu": "gloo"}
MOST_NAMES = 4


@contextmanager
def limited(
    store: Any, position: Position, connection: Connection, kind: str, seconds: float
) -> Iterator[None]:
    """Limit the time in which this rank connects to the others inside the block.

    After `seconds`, log one line that lists the missing ranks, and end the process with 200.
    """
    over = threading.Event()

    def end() -> None:
        if not over.wait(seconds):
            log.error("%s", timeout_message(position, kind, seconds, states(position, connection)))
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


def states(position: Position, connection: Connection) -> list[tuple[str, str]]:
    """Return (name, state) of all other ranks; empty if the store does not answer.

    It uses a new connection, because the blocked thread may hold the rank's own.
    """
    others = [rank for rank in range(position.world_size) if rank != position.rank]
    try:
        # Any rank but 0 connects as a client; rank 0 may host the store in this process.
        client = replace(position, rank=position.rank or 1)
        store = open_store(client, connection, timedelta(seconds=LEAVE_SECONDS))
        keys = [key for rank in others for key in (f"connecting/name/{rank}", _key(rank))]
        found = store.multi_get(keys) if store.has_extended_api() else [store.get(key) for key in keys]
    # The store may be gone with rank 0. The message helps without the names, too.
    except (RuntimeError, OSError, ValueError):
        return []
    words = [word.decode() for word in found]
    return list(zip(words[::2], words[1::2], strict=True))


def timeout_message(position: Position, kind: str, seconds: float, others: list[tuple[str, str]]) -> str:
    """Return the message for a timeout: which rank waits, for which ranks, and where to look."""
    message = f"{LIBRARIES[kind]} has not connected the {position.world_size} ranks within {seconds:g} s"
    here = f"{_name(position)} waits"
    # Ranks that have not begun come first, because the others may be waiting for them.
    for state in (COMES, CONNECTS):
        names = [name for name, each in others if each == state]
        if names:
            more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
            here += f"; {state}: {', '.join(names[:MOST_NAMES])}{more}"
    if any(state == COMES for _, state in others):
        return f"{message}: {here}; see the log of that rank, or raise --master-timeout"
    return f"{message}: {here}; {_network_remedy(kind)}"


def _network_remedy(kind: str) -> str:
    variable = f"{LIBRARIES[kind].upper()}_SOCKET_IFNAME"
    interface = os.environ.get(variable)
    is_set = f"is {interface}" if interface else "is not set"
    remedy = f"{variable} {is_set}; set it to the network interface that reaches the other nodes"
    return f"{remedy}; set NCCL_DEBUG=INFO to see what NCCL tries" if kind == "cuda" else remedy


def _name(position: Position) -> str:
    return f"rank {position.rank} on node {position.node_rank} ({position.node_name})"


def _key(rank: int) -> str:
    return f"connecting/{rank}"


class StoreNotices:
    """The `ShardNotices` of a generation. Raises the store's RuntimeError if it is gone."""

    def __init__(self, store: Any) -> None:
        self._store = PrefixStore("tandem-saves", store)

    def set(self, key: str, value: object) -> None:
        self._store.set(key, json.dumps(value))

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        # A get would wait, and block the client that the process group also uses.
        if not self._store.check(list(keys)):
            return None
        return [json.loads(self._store.get(key)) for key in keys]

    def delete(self, key: str) -> None:
        with contextlib.suppress(RuntimeError):  # a store in a file cannot
            self._store.delete_key(key)
