"""Answer an agent's requests in a rank: its stacks, a profile of the next steps, its memory.

A request arrives on the pipe from the agent (`script/lifeline.py`), in every kind of workload. The answer is
a file in a directory that the agent names, because it may be large, and no rank must wait for a reader. See
docs/architecture.md#looking-inside-a-run.
"""

import gc
import json
import os
import pickle
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tandem.telemetry import profiling
from tandem.telemetry.agent_state import resident_bytes
from tandem.telemetry.journal import write_bytes_atomic
from tandem.telemetry.messages import checked
from tandem.telemetry.stacks import thread_stacks

ACTIONS = ("stacks", "profile", "memory")
CANCEL = "cancel"
"""Ends a rank's recording; only ranks get it."""


@dataclass(frozen=True)
class Request:
    """A request of node 0 to all ranks.

    `options` by action: `first` and `steps` (profile), `seconds` (memory). `limit`: the seconds after which
    node 0 stops waiting.
    """

    id: str
    action: str
    limit: float
    options: dict[str, float]


@dataclass
class Answer:
    """A rank's answer: its `facts`, or an `error` of one line. `file` is the name of a file next to it."""

    rank: int
    facts: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    file: str | None = None


def answer_path(folder: Path, request: str, rank: int) -> Path:
    return folder / f"{request}-{rank}.json"


def to_rank(request: Request, rank: int, folder: Path) -> bytes:
    """Encode a request for the pipe of one rank, which answers in `folder`."""
    return json.dumps({**asdict(request), "rank": rank, "folder": str(folder)}).encode()


def handle(message: bytes) -> None:
    """Answer a request from the pipe; a malformed one is dropped. Never raises, and never waits."""
    try:
        words = json.loads(message)
        request = checked(Request, words)
        rank = int(words["rank"])
        folder = Path(words["folder"])
    except (ValueError, TypeError, KeyError):
        return

    def answer(facts: Mapping[str, Any], error: str | None = None, file: Path | None = None) -> None:
        write_answer(folder, request.id, Answer(rank, dict(facts), error, file.name if file else None))

    if request.action == CANCEL:
        profiling.cancel()
    # Answer at once: a new thread may not start in a process that is short of memory or threads.
    if request.action == "stacks":
        _reporting(lambda: answer({"threads": thread_stacks()}), answer)
    elif request.action == "profile":
        path = folder / f"{request.id}-{rank}.trace"
        _reporting(lambda: profiling.ask(request.options, path, answer), answer)
    elif request.action == "memory":
        # Use a new thread, because this one must notice the end of the pipe meanwhile.
        threading.Thread(
            target=_reporting,
            args=(lambda: measure(request.options, folder / f"{request.id}-{rank}.memory", answer), answer),
            name="tandem-inspection",
            daemon=True,
        ).start()


def _reporting(run: Callable[[], None], answer: Callable[[Mapping[str, Any], str], None]) -> None:
    try:
        run()
    except Exception as error:  # training continues, whatever error the inspection met
        try:
            answer({}, f"{type(error).__name__}: {error}")
        except OSError:  # the agent's directory is full or gone, so no answer can reach it
            pass


def write_answer(folder: Path, request: str, answer: Answer) -> None:
    """Write an answer in one piece, so that its reader never sees a part. Raises OSError."""
    content = json.dumps(asdict(answer)).encode()
    write_bytes_atomic(answer_path(folder, request, answer.rank), content, is_durable=False)


# What uses a rank's memory: from torch's allocator on GPUs, else from tracemalloc.
#
# tracemalloc sees only what Python allocates while it is on. It is on for some seconds, in which the rank's
# Python code is slower. It does not see the data of CPU tensors; those are counted as objects.

SHOWN = 15
"""Number of rows in each table."""


def measure(options: Mapping[str, float], path: Path, report: profiling.Report) -> None:
    """Watch allocations for `seconds`, then report them; on a GPU, `path` gets the allocator's snapshot."""
    seconds = options["seconds"]
    torch = sys.modules.get("torch")
    on_gpu = torch is not None and torch.cuda.is_initialized()
    facts: dict[str, Any] = {"watched_seconds": seconds, "resident_bytes": resident_bytes(os.getpid())}
    if torch is not None:
        facts["tensors"] = _tensors(torch)
    if torch is not None and on_gpu:
        # All devices: the current device of this thread need not be the rank's.
        facts["gpus"] = [
            {
                "gpu": gpu,
                "allocated": torch.cuda.memory_allocated(gpu),
                "reserved": torch.cuda.memory_reserved(gpu),
                "peak": torch.cuda.max_memory_allocated(gpu),
            }
            for gpu in range(torch.cuda.device_count())
            if torch.cuda.memory_reserved(gpu)
        ]
        from tandem.torch_private import memory_snapshot

        path.write_bytes(pickle.dumps(memory_snapshot(lambda: time.sleep(seconds))))
        report(facts, None, path)
    else:
        facts["lines"] = _allocated_lines(seconds)
        report(facts, None, None)


def _tensors(torch: Any) -> list[dict[str, Any]]:
    """Return the live tensors by device, type and shape, those with the most bytes first.

    Views of one storage count once, with the first shape that is found.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    seen = set[int]()
    for each in gc.get_objects():
        # Compare types, because isinstance() would run the code of proxies and lazy modules.
        if not issubclass(type(each), torch.Tensor):
            continue
        with suppress(RuntimeError, NotImplementedError):  # it has no storage: sparse, fake, freed meanwhile
            tensors = [each, each.grad] if each.is_leaf and each.grad is not None else [each]
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if storage.data_ptr() in seen or not storage.nbytes():
                    continue
                seen.add(storage.data_ptr())
                kind = str(tensor.dtype).removeprefix("torch.")
                name = (str(tensor.device), kind, str(list(tensor.shape)))
                found[name] += storage.nbytes()
                counts[name] += 1
    return [
        {"device": name[0], "type": name[1], "shape": name[2], "count": counts[name], "bytes": size}
        for name, size in found.most_common(SHOWN)
    ]


def _allocated_lines(seconds: float) -> list[dict[str, Any]]:
    """Return the lines that allocated most of the memory that is still in use after `seconds`."""
    is_ours = not tracemalloc.is_tracing()
    if is_ours:
        tracemalloc.start()
    try:
        time.sleep(seconds)
        snapshot = tracemalloc.take_snapshot()
    finally:
        if is_ours:  # the program itself may use it
            tracemalloc.stop()
    own = tracemalloc.Filter(False, tracemalloc.__file__)
    rows = snapshot.filter_traces([own, tracemalloc.Filter(False, __file__)]).statistics("lineno")[:SHOWN]
    return [{"place": str(row.traceback[0]), "count": row.count, "bytes": row.size} for row in rows]
