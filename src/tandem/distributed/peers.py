"""Is another rank gone? Read from torch's typed errors and from gloo's and NCCL's own messages alone.

gloo, and NCCL before torch 2.2, throw bare RuntimeErrors: only their text tells them from a task's error.
Both libraries begin it in ways of their own, so each pattern holds at the beginning; a word such as "store"
or "timed out" further on says nothing. tests/multi/test_peer_loss.py provokes real ones of this torch.

An error of a store is typed and says nothing of whose store it was: a program may have stores of its own, of
which other ranks know nothing. The address in the text tells, else the store in the line that raised it.
"""

import dis
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tandem.errors import text_of
from tandem.torch_private import stores_of_groups, without_prefixes

LOST_PEER_MESSAGES = {
    # gloo says where it threw: "[/__w/.../gloo/transport/tcp/pair.cc:561] Connection closed by peer",
    # "[.../unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation". torch 2.11 to 2.15.
    "gloo": re.compile(r"\[\S*/gloo/\S+\.(cc|h):\d+\] "),
    # "Gloo connectFullMesh failed with [.../pair.cc:161] ..." while a group opens. torch 2.11 to 2.15.
    "gloo opens": re.compile(r"Gloo connectFullMesh failed with "),
    # c10d's Work::wait, when a collective's own time limit is over. torch 2.11 to 2.15 (Work.cpp).
    "c10d": re.compile(r"Operation timed out!"),
    # ProcessGroupNCCL.cpp, NCCLUtils.hpp. Typed since 2.2; kept for what is handed on as text.
    "NCCL": re.compile(
        r"NCCL (error in: |communicator (was aborted|encountered error)|Error \d+: )"
        r"|\[(PG [^\]]*)?Rank \d+\] .*(Watchdog caught collective operation timeout|NCCL watchdog)"
    ),
    # nccl2/ProcessGroupNCCL.cpp, torch 2.15: untyped, "NCCL AllReduce failed: " and ncclGetErrorString's.
    # Those for a mistake of the caller's, or for CUDA's errors, are none of another rank.
    "NCCL2": re.compile(
        r"(NCCL [\w ]+ failed[^:\n]*|NCCL Async Error|NCCL timeout in"
        r"|Failed to (initialize NCCL communicator|get NCCL unique ID)[^:\n]*): "
        r"(remote process exited|unhandled system error|internal error)"
        r"|NCCL operation (timed out|failed)|Watchdog caught collective operation timeout: NCCL operation"
    ),
}
CALLBACK = re.compile(r"(Got the following error when running the callback: (\w+: )?)+")
"""What torch's futures put before an error that a hook of DDP has passed on. torch 2.11 to 2.15."""


ADDRESS = re.compile(r"connect to \((?P<host>[^\s()]+), (?P<port>\d+)\)|network address\. port: (?P<own>\d+)")
"""Of a store that cannot be reached, or cannot be opened. torch 2.11 to 2.15 (TCPStore, socket.cpp)."""
LOCAL = ("localhost", "::1", "127.0.0.1")
DEPTH, MOST_ITEMS = 3, 100
"""How far a store may be below a name of the failing line: `self.stores["a"]` is two."""


def is_peer_loss(error: BaseException, world_size: int) -> bool:
    """Whether `error`, or one that it came from or that was being handled, is the loss of another rank.

    That is also the loss of the store through which ranks meet. Everything else is an error of the task, and
    so is everything in a world of one.
    """
    return world_size > 1 and any(_is_of_a_peer(each) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, its causes and contexts, and the members of groups, each once."""
    seen, left = set[int](), [error]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += each.exceptions if isinstance(each, BaseExceptionGroup) else []
        left += [other for other in (each.__context__, each.__cause__) if other is not None]


def _is_of_a_peer(error: BaseException) -> bool:
    if isinstance(error, dist.DistNetworkError | dist.DistStoreError):
        return _is_of_the_jobs_store(error)
    if isinstance(error, dist.DistBackendError):
        return True
    text = text_of(error)
    text = CALLBACK.sub("", text, count=1) if CALLBACK.match(text) else text
    return isinstance(error, RuntimeError) and any(p.match(text) for p in LOST_PEER_MESSAGES.values())


def _is_of_the_jobs_store(error: BaseException) -> bool:
    """Whether it came from a store below a group, or at MASTER_ADDR; where nothing tells, it did."""
    found = ADDRESS.search(text_of(error))
    if found is not None:
        return _is_the_jobs(found["host"] or LOCAL[0], int(found["port"] or found["own"]))
    traces = list(_traces(error.__traceback__))
    stores = next((stores for trace in reversed(traces) if (stores := _stores_named(trace))), None)
    return stores is None or any(
        store in stores_of_groups() or _is_the_jobs(getattr(store, "host", ""), getattr(store, "port", 0))
        for store in map(without_prefixes, stores)
    )


def _is_the_jobs(host: str, port: int) -> bool:
    """Whether ranks of the job meet at this address."""
    master = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    known = [(each.host, str(each.port)) for each in stores_of_groups() if hasattr(each, "port")]
    return any(str(port) == there and host in (name, *LOCAL) for name, there in [master, *known])


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _stores_named(trace: TracebackType) -> list[Any]:
    """The stores that the failing line of a frame names, as `store` or `self.stores["a"]`; else its code."""
    code = trace.tb_frame.f_code
    there = {**trace.tb_frame.f_globals, **trace.tb_frame.f_locals}
    named = [each for each in dis.get_instructions(code) if isinstance(each.argval, str)]
    in_line = [each for each in named if each.positions and each.positions.lineno == trace.tb_lineno]
    for found in in_line, named:
        names, stores = {each.argval for each in found}, list[Any]()
        with suppress(Exception):  # of a program's objects, which may do anything when they are looked at
            for name in names & there.keys():
                stores += _stores_below(there[name], names, DEPTH)
        if stores:
            return stores
    return []


def _stores_below(value: Any, names: set[str], depth: int) -> Iterator[Any]:
    if isinstance(value, Store):
        yield value
    elif depth:
        parts = vars(value) if hasattr(value, "__dict__") else {}
        items = list(value.values()) if isinstance(value, dict) else value
        inside = items[:MOST_ITEMS] if isinstance(items, list | tuple) else ()
        for part in (*(parts[name] for name in names & parts.keys()), *inside):
            yield from _stores_below(part, names, depth - 1)
