"""Report what uses a rank's memory, on request: from torch's allocator on GPUs, else from tracemalloc.

tracemalloc sees only what Python allocates while it is on. It is on for some seconds, in which the rank's
Python code is slower. It does not see the data of CPU tensors; those are counted as objects.
"""

import gc
import os
import pickle
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.telemetry.agent_state import resident_bytes

Report = Callable[[Mapping[str, Any], str | None, Path | None], None]
SHOWN = 15
"""Number of rows in each table."""


def measure(options: Mapping[str, float], path: Path, report: Report) -> None:
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
