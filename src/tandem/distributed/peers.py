"""Detect that another rank is gone, from torch's typed errors and gloo's and NCCL's messages alone.

gloo, and NCCL before torch 2.2, raise bare RuntimeErrors. Only their text distinguishes them from an error in
a task. Their messages start in a characteristic way, so each pattern matches the start of the text: a word
such as "store" or "timed out" later in it proves nothing. tests/multi/test_peer_loss.py provokes real errors
with the installed torch.

A store's error has its own type, but a program may also have private stores that other ranks do not use. The
address in the error's text identifies the store. Without an address, the line that raised the error does.
"""

import dis
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from tandem.errors import text_of
from tandem.torch_private import stores_of_groups, without_prefixes

LOST_PEER_MESSAGES = {
    # gloo includes the place: "[/__w/.../gloo/transport/tcp/pair.cc:561] Connection closed by peer",
    # "[.../unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation". torch 2.11 to 2.15.
    "gloo": re.compile(r"\[\S*/gloo/\S+\.(cc|h):\d+\] "),
    # "Gloo connectFullMesh failed with [.../pair.cc:161] ..." while a group opens. torch 2.11 to 2.15.
    "gloo opens": re.compile(r"Gloo connectFullMesh failed with "),
    # c10d's Work::wait, when a collective exceeds its time limit. torch 2.11 to 2.15 (Work.cpp).
    "c10d": re.compile(r"Operation timed out!"),
    # ProcessGroupNCCL.cpp, NCCLUtils.hpp. Typed since 2.2; kept for errors that are passed on as text.
    "NCCL": re.compile(
        r"NCCL (error in: |communicator (was aborted|encountered error)|Error \d+: )"
        r"|\[(PG [^\]]*)?Rank \d+\] .*(Watchdog caught collective operation timeout|NCCL watchdog)"
    ),
    # nccl2/ProcessGroupNCCL.cpp, torch 2.15: untyped, "NCCL AllReduce failed: " and the text of
    # ncclGetErrorString. Texts for mistakes of the caller or for CUDA errors do not indicate a lost rank.
    "NCCL2": re.compile(
        r"(NCCL [\w ]+ failed[^:\n]*|NCCL Async Error|NCCL timeout in"
        r"|Failed to (initialize NCCL communicator|get NCCL unique ID)[^:\n]*): "
        r"(remote process exited|unhandled system error|internal error)"
        r"|NCCL operation (timed out|failed)|Watchdog caught collective operation timeout: NCCL operation"
    ),
}
CALLBACK = re.compile(r"(Got the following error when running the callback: (\w+: )?)+")
"""The prefix that torch's futures add to an error from a DDP hook. torch 2.11 to 2.15."""


ADDRESS = re.compile(r"connect to \((?P<host>[^\s()]+), (?P<port>\d+)\)|network address\. port: (?P<own>\d+)")
"""The address in errors of a store that cannot be reached or opened.

torch 2.11 to 2.15 (TCPStore, socket.cpp).
"""
LOCAL = ("localhost", "::1", "127.0.0.1")
DEPTH = 3
MOST_ITEMS = 100
"""A store may be DEPTH levels below a name in the failing line: `self.stores["a"]` has depth two."""


def is_peer_loss(error: BaseException, world_size: int) -> bool:
    """Return True if `error`, or any of its causes or contexts, is the loss of another rank.

    The loss of the store through which ranks meet also counts. Everything else is an error of the task, and
    so is every error with a world size of one.
    """
    return world_size > 1 and any(_is_of_a_peer(each) for each in chain(error))


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the members of exception groups, each once."""
    seen = set[int]()
    left = [error]
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
    """Return True if the error is from a store of a group or at MASTER_ADDR, or if that is unknown."""
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
    """Return True if the job's ranks meet at this address."""
    master = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    known = [(each.host, str(each.port)) for each in stores_of_groups() if hasattr(each, "port")]
    return any(str(port) == there and host in (name, *LOCAL) for name, there in [master, *known])


def _traces(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _stores_named(trace: TracebackType) -> list[Any]:
    """Return the stores named in the failing line of a frame, or else anywhere in its code."""
    code = trace.tb_frame.f_code
    there = {**trace.tb_frame.f_globals, **trace.tb_frame.f_locals}
    named = [each for each in dis.get_instructions(code) if isinstance(each.argval, str)]
    in_line = [each for each in named if each.positions and each.positions.lineno == trace.tb_lineno]
    for found in in_line, named:
        names = {each.argval for each in found}
        stores = list[Any]()
        with suppress(Exception):  # a program's objects may do anything when they are inspected
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


# Detect GPU failures that a new process may fix, from CUDA's error codes or its messages.
#
# After such a failure, the process cannot use its GPU again, because its context is lost. A device assert (an
# index or label out of range) would recur, and so would a lack of memory for the batch. Those are errors of
# the task.

CODES = {
    46: "devices unavailable",
    214: "uncorrectable ECC error",
    220: "uncorrectable NVLink error",
    226: "contained error",
    700: "illegal memory access",
    702: "launch timed out",
    714: "hardware stack error",
    715: "illegal instruction",
    716: "misaligned address",
    718: "invalid program counter",
    719: "launch failure",
    802: "system not ready",
    999: "unknown error",
}
"""cudaError_t of CUDA 12 and 13 (driver_types.h)."""
WORDS = re.compile(
    r"(CUDA error: |CUDA driver error: |Cuda failure (\d+ )?'|from cudaGetDeviceCount\(\)\. .*Error \d+: )"
    r"(CUDA-capable device\(s\) is/are busy or unavailable|uncorrectable |an illegal memory access"
    r"|the launch timed out|hardware stack error|an illegal instruction|misaligned address"
    r"|invalid program counter|unspecified launch failure|system not yet initialized|unknown error"
    r"|invalid/unsupported operation due to|contained error)"
)
"""Messages as torch raises them, even when CUDA starts, and as NCCL passes them on.

An example of the latter is "Cuda failure 719 'unspecified launch failure'".
"""
REFUSES = re.compile(
    r"CUDA error: |CUDA driver error: |CUDA out of memory|The NVIDIA driver |Unexpected error from cuda"
)
"""How CUDA's own errors begin when torch raises them."""


def is_of_cuda(error: BaseException) -> bool:
    """Return True if `error` is from CUDA itself, whether a GPU failure or an invalid request."""
    # Older versions of torch have no AcceleratorError and raise a RuntimeError.
    kinds = getattr(torch, "AcceleratorError", torch.OutOfMemoryError), torch.OutOfMemoryError
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and bool(REFUSES.match(text_of(error)))
    )


def is_gpu_failure(error: BaseException) -> bool:
    """Return True if `error`, from CUDA or passed on by NCCL, means that this rank's own GPU has failed."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and isinstance(error, getattr(torch, "AcceleratorError", RuntimeError)):
        return code in CODES
    return isinstance(error, RuntimeError) and WORDS.search(text_of(error)) is not None
