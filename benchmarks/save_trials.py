"""Measure what saving costs a step: how long an asynchronous save blocks it, and the cost of a snapshot.

    python benchmarks/save_trials.py [--megabytes 100] [--trials 20]

The state of an AdamW model is saved by tandem, and by torch.distributed.checkpoint's asynchronous save (with
a thread), in the same run. Both are compared with a plain copy of the same bytes into warm memory. Snapshots
are taken after every step, with steps that last 20 such copies, by 1 and by 2 processes. The baseline is the
same steps without snapshots.
"""

import argparse
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint import async_save

from table import Row, render
from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.snapshot import Snapshots
from tandem.checkpoint.state import flatten
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter
from tandem.config.address import address

STEP_COPIES = 20
SNAPSHOT_LIMITS = {1: 0.06, 2: 0.035}


def state_of(megabytes: int) -> dict[str, Any]:
    """Return weights and AdamW's two moments, `megabytes` in all, in 60 tensors."""
    count = megabytes * 2**20 // 4 // 60
    parts: list[dict[str, Tensor]] = [{f"layer{i}": torch.randn(count) for i in range(20)} for _ in range(3)]
    return {"model": parts[0], "optimizer": {"exp_avg": parts[1], "exp_avg_sq": parts[2]}}


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copy_seconds(tensors: list[Tensor], trials: int = 20) -> float:
    """Return the median time of a copy of `tensors` into warm memory."""
    targets = [tensor.clone() for tensor in tensors]
    return statistics.median(seconds(lambda: torch._foreach_copy_(targets, tensors)) for _ in range(trials))


def held(
    directory: PurePath, megabytes: int, trials: int, beside: Callable[[int, dict[str, Any]], None]
) -> tuple[float, float, float]:
    """Medians, in seconds: `save` to `directory` keeps the caller, until it is whole there, a plain copy.

    `beside(step, state)` has its turn after each save.
    """
    torch.set_num_threads(1)
    state = state_of(megabytes)
    tensors = flatten(state)[1]
    targets = [tensor.clone() for tensor in tensors]
    writer = CheckpointWriter(CheckpointStore(directory), Retention(2), 0)
    holds, saves, copies = [], [], []
    for step in range(1, trials + 2):
        began = time.perf_counter()
        writer.save(step, state, {})
        holds.append(time.perf_counter() - began)
        writer.wait()
        saves.append(time.perf_counter() - began)
        beside(step, state)
        copies.append(seconds(lambda: torch._foreach_copy_(targets, tensors)))
    hold, whole, copy = (statistics.median(each[1:]) for each in (holds, saves, copies))  # 1st: allocates
    return hold, whole, copy


def save_stall(megabytes: int, trials: int) -> list[Row]:
    """Measure how long `save` blocks the caller, in three ways that take turns."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    theirs = []
    with tempfile.TemporaryDirectory(prefix="tandem-saves-") as folder:

        def by_torch(step: int, state: dict[str, Any]) -> None:
            began = time.perf_counter()
            future: Any = async_save(state, checkpoint_id=Path(folder) / f"dcp-{step % 2}")
            theirs.append(time.perf_counter() - began)
            future.result()

        hold, _, copy = held(Path(folder) / "ours", megabytes, trials, by_torch)
    dist.destroy_process_group()
    dcp = statistics.median(theirs[1:])
    return [
        Row(
            f"step blocked by a save of {megabytes} MB",
            trials,
            f"{hold * 1000:.1f} ms",
            f"memcpy of the same bytes {copy * 1000:.1f} ms",
            f"{hold / copy:.2f}",
            "at most 1.5",
            hold / copy <= 1.5,
            trials,
            hold,
            copy,
        ),
        Row(
            f"step blocked by a save of {megabytes} MB",
            trials,
            f"{hold * 1000:.1f} ms",
            f"torch.distributed.checkpoint.async_save {dcp * 1000:.1f} ms",
            f"{hold / dcp:.2f}",
            "at most 0.35",
            hold / dcp <= 0.35,
            trials,
            hold,
            dcp,
        ),
    ]


@contextmanager
def object_store() -> Iterator[PurePath]:
    """Run a moto server, reached over loopback, with a bucket."""
    import fsspec
    import fsspec.config

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            if time.monotonic() > deadline:
                raise TimeoutError("no moto server after 60 s")
            time.sleep(0.1)
        options = {"key": "k", "secret": "s", "endpoint_url": f"http://127.0.0.1:{port}"}
        os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
        fsspec.filesystem("s3", **options).mkdir("bucket")
        fsspec.config.conf["s3"] = options
        yield address("s3://bucket/run")
    finally:
        fsspec.config.conf.pop("s3", None)
        server.kill()
        server.wait()


def remote_save_stall(megabytes: int, trials: int) -> Row:
    """Measure how long `save` blocks the caller if checkpoints go to an object store."""
    with object_store() as directory:
        hold, whole, copy = held(directory / "checkpoints", megabytes, trials, lambda step, state: None)
    return Row(
        f"step blocked by a save of {megabytes} MB to an object store (moto)",
        trials,
        f"{hold * 1000:.1f} ms, the save takes {whole:.1f} s in the background",
        f"memcpy of the same bytes {copy * 1000:.1f} ms",
        f"{hold / copy:.2f}",
        "at most 1.5",
        hold / copy <= 1.5,
        trials,
        hold,
        copy,
    )


def snapshot_overhead(megabytes: int, ranks: int, steps: int) -> Row:
    """Measure steps that compute as long as 20 copies, with and without a snapshot, in turn."""
    context = multiprocessing.get_context("fork")
    regions = [NodeMemory() for _ in range(ranks)]
    barrier = context.Barrier(ranks)
    results = context.Queue()
    processes = [
        context.Process(target=_snapshot_steps, args=(megabytes, regions, rank, steps, barrier, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    plain, with_snapshot = zip(*(results.get(timeout=300) for _ in processes), strict=True)
    for process in processes:
        process.join()
    overhead = statistics.mean(with_snapshot) / statistics.mean(plain) - 1
    return Row(
        f"snapshot of {megabytes} MB after every step, {ranks} rank{'s' * (ranks > 1)}",
        steps,
        f"step {statistics.mean(with_snapshot) * 1000:.1f} ms",
        f"without {statistics.mean(plain) * 1000:.1f} ms (20 copies)",
        f"+{overhead:.1%}",
        f"at most {SNAPSHOT_LIMITS[ranks]:.1%}",
        overhead <= SNAPSHOT_LIMITS[ranks],
        steps,
        statistics.mean(with_snapshot),
        statistics.mean(plain),
    )


def _snapshot_steps(
    megabytes: int, regions: list[NodeMemory], rank: int, steps: int, barrier: Barrier, results: Any
) -> None:
    torch.set_num_threads(1)
    state = state_of(megabytes)
    length = STEP_COPIES * copy_seconds(flatten(state)[1])
    snapshots = Snapshots(regions, rank, None)
    snapshots.take(1, state, own=())
    snapshots.take(2, state, own=())
    taken: dict[bool, list[float]] = {False: [], True: []}
    for step in range(3, 3 + 2 * steps):
        with_snapshot = step % 2 == 0
        barrier.wait()
        began = time.perf_counter()
        until = began + length
        while time.perf_counter() < until:
            pass
        if with_snapshot:
            snapshots.take(step, state, own=())
        barrier.wait()  # ranks step together
        taken[with_snapshot].append(time.perf_counter() - began)
    results.put((statistics.median(taken[False]), statistics.median(taken[True])))
    results.close()
    results.join_thread()
    os._exit(0)


def rows(megabytes: int, trials: int) -> list[Row]:
    snapshots = [snapshot_overhead(megabytes, ranks, trials) for ranks in (1, 2)]
    return [*save_stall(megabytes, trials), remote_save_stall(megabytes, trials), *snapshots]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--trials", type=int, default=20)
    asked = parser.parse_args()
    print(render(rows(asked.megabytes, asked.trials)))
