"""Measure what a save costs ranks with shards: extra memory, and how long the step is blocked.

    python benchmarks/sharded_saves.py [--gigabytes 1] [--ranks 4] [--trials 20] [--json FILE]

The ranks are processes on this machine, over gloo. Model and AdamW state are sharded by fully_shard. tandem
and torch.distributed.checkpoint's asynchronous save write the same state in turn. All ranks start a save
together, and the slowest one counts. Extra memory is the peak resident memory during a save minus that before
the first one, without files. After each save, a memcpy of a rank's part into warm memory is measured. Then 3,
2 and 4 ranks load the state and save it again. Needs memory of 2.6 times the state, and disk space for two.
"""

import argparse
import ctypes
import hashlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import async_save

from table import Row, finish
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.sharded import read_rows, read_state
from tandem.checkpoint.state import flatten
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import ShardedWriter
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.group_store import StoreNotices
from tandem.distributed.position import Connection, Position

WIDTH = 1024
LIMIT_SECONDS = 600.0
MOST_EXTRA, MOST_BLOCKED = 1.15, 1.0
OTHERS = (3, 2, 4)


class Rank:
    """A rank with its shards of model and optimizer."""

    def __init__(self, rank: int, ranks: int, folder: Path, gigabytes: float) -> None:
        torch.set_num_threads(1)
        position = Position(rank=rank, local_rank=rank, world_size=ranks)
        meeting = Connection(init=f"file://{folder}/meeting-{ranks}")
        self.group = ProcessGroup.open(position, meeting, torch.device("cpu"), LIMIT_SECONDS)
        self.strategy = strategies.load("fsdp", self.group)
        torch.manual_seed(1)
        blocks = max(1, round(gigabytes * 1e9 / 12 / WIDTH**2))  # weights and two moments, in float32
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(blocks)]
        self.model = self.strategy.shard(nn.Sequential(nn.ModuleList(layers)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        store = CheckpointStore(folder / "ours")
        self.store = store
        self.theirs = dist.new_group()  # its thread uses a group while the training thread uses the other
        notices = StoreNotices(self.group.store)
        self.writer = ShardedWriter(rank, ranks, notices, store, Retention(len(OTHERS) + 2), 0)

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, step: int) -> None:
        self.writer.save(step, {**self.strategy.local_state(self.state()), "step": step}, {})

    def load(self, step: int) -> None:
        read = self.strategy.with_shards(read_rows(self.store, step, self.strategy.rows)[0])
        self.strategy.load_model(self.model, read["model"])
        self.strategy.load_optimizer(self.optimizer, read["optimizer"])

    def together(self, work: Callable[[], object]) -> float:
        """Return the seconds of `work`, which all ranks start at the same time, on the slowest rank."""
        self.group.sum([0.0])
        began = time.perf_counter()
        work()
        return max(self.group.gather_json(time.perf_counter() - began))


def resident() -> tuple[int, int]:
    """Return (bytes without files, peak resident bytes since `forget_peak`)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kilobytes = {name: int(value.split()[0]) for name, value in lines.items() if name[:3] in ("Rss", "VmH")}
    return 1024 * (kilobytes["RssAnon"] + kilobytes["RssShmem"]), 1024 * kilobytes["VmHWM"]


def forget_peak() -> int:
    """Reset the peak; return the resident bytes of files, which a peak also contains."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident()[1] - resident()[0]


def save_by_tandem(rank: Rank, step: int, _folder: Path) -> float:
    """Return how long a save blocks the step; wait until it is complete."""
    taken = rank.together(lambda: rank.save(step))
    rank.writer.wait()
    return taken


def save_by_torch(rank: Rank, step: int, folder: Path) -> float:
    """Do the same with torch.distributed.checkpoint, and remove its files."""
    futures: list[Any] = []
    path = folder / f"dcp-{step}"

    def save() -> None:
        futures.append(async_save(rank.state(), checkpoint_id=path, process_group=rank.theirs))

    taken = rank.together(save)
    futures[0].result()
    rank.group.sum([0.0])
    if rank.group.is_first:
        shutil.rmtree(path)
    return taken


def measured(rank: Rank, folder: Path, trials: int) -> dict[str, Any]:
    """Return a rank's results: its part in bytes, seconds of each trial, and extra memory of both saves."""
    tensors = [each for each in flatten(rank.strategy.local_state(rank.state()))[1] if each.dim() > 0]
    part = sum(each.nbytes for each in tensors)
    found: dict[str, Any] = {"part": part, "ours": [], "dcp": [], "copy": []}
    copies = [each.clone() for each in tensors]
    for name in ("ours", "dcp"):  # apart, so that no save uses memory that the other one has left
        ctypes.CDLL(None).malloc_trim(0)  # nor what the optimizer has left
        before = resident()[0]
        extra = 0
        for step in range(1, trials + 2):
            files = forget_peak()
            save = save_by_tandem if name == "ours" else save_by_torch
            found[name].append(save(rank, step, folder))
            extra = max(extra, resident()[1] - files - before)
            found["copy"].append(rank.together(lambda: torch._foreach_copy_(copies, tensors)))
        found[f"{name} memory"] = extra
    return found


def digest(state: dict[str, Any]) -> str:
    """Return a digest of the bits of all tensors of a whole state."""
    whole = hashlib.sha256()
    for tensor in flatten({part: state[part] for part in ("model", "optimizer")})[1]:
        whole.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        whole.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return whole.hexdigest()


def _work(rank: int, ranks: int, folder: Path, gigabytes: float, trials: int, step: int) -> None:
    here = Rank(rank, ranks, folder, gigabytes)
    if step == 0:
        found = measured(here, folder, trials)
        (folder / f"{rank}.json").write_text(json.dumps(found))
    else:
        here.load(step)
        here.save(step + 1)
        here.writer.wait()
    here.group.sum([0.0])
    os._exit(0)


def in_ranks(ranks: int, folder: Path, gigabytes: float, trials: int, step: int) -> None:
    """Measure saves in steps 1 to `trials` + 1, or with `step` load it and save the next one."""
    for meeting in folder.glob("meeting-*"):
        meeting.unlink()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_work, args=(rank, ranks, folder, gigabytes, trials, step))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + LIMIT_SECONDS
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        if any(process.exitcode for process in processes):
            raise RuntimeError(f"exit codes {[process.exitcode for process in processes]}")
    finally:
        for process in processes:
            process.kill()


def rows(ranks: int, gigabytes: float, trials: int, folder: Path) -> list[Row]:
    in_ranks(ranks, folder, gigabytes, trials, 0)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    # The first save of each kind allocates.
    ours, dcp, copy = (statistics.median(found[0][name][1:]) for name in ("ours", "dcp", "copy"))
    extra, theirs = (max(each[f"{name} memory"] / each["part"] for each in found) for name in ("ours", "dcp"))
    about = f"{gigabytes:g} GB of state on {ranks} ranks"
    return [
        Row(
            f"extra memory of a save, {about}",
            trials,
            f"{extra:.2f} of a rank's part",
            f"torch.distributed.checkpoint.async_save {theirs:.2f}",
            f"{extra / theirs:.2f}",
            f"at most {MOST_EXTRA}",
            extra <= MOST_EXTRA,
            trials,
        ),
        Row(
            f"step blocked by a save, {about}",
            trials,
            f"{ours * 1000:.1f} ms",
            f"memcpy of a rank's part {copy * 1000:.1f} ms",
            f"{ours / copy:.2f}",
            f"at most {MOST_BLOCKED}",
            ours / copy <= MOST_BLOCKED,
            trials,
            ours,
            copy,
        ),
        Row(
            f"step blocked by a save, {about}",
            trials,
            f"{ours * 1000:.1f} ms",
            f"torch.distributed.checkpoint.async_save {dcp * 1000:.1f} ms",
            f"{ours / dcp:.2f}",
            passed=None,
            control_trials=trials,
            seconds=ours,
            control_seconds=dcp,
        ),
        resharded(ranks, gigabytes, trials, folder),
    ]


def resharded(ranks: int, gigabytes: float, trials: int, folder: Path) -> Row:
    """Load the state of the last trial with other numbers of ranks, and save it again."""
    store = CheckpointStore(folder / "ours")
    step = trials + 1
    digests = [digest(read_state(store, step)[0])]
    for count in OTHERS:
        in_ranks(count, folder, gigabytes, trials, step)
        step += 1
        digests.append(digest(read_state(store, step)[0]))
    equal = sum(each == digests[0] for each in digests[1:])
    return Row(
        f"{ranks} to {' to '.join(map(str, OTHERS))} ranks, {gigabytes:g} GB of state",
        len(OTHERS),
        f"{equal} of {len(OTHERS)} have equal tensors",
        target="all",
        passed=equal == len(OTHERS),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0, help="of all ranks' state together")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are; default is a temporary one")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sharded-saves-", dir=asked.folder) as folder:
        found = rows(asked.ranks, asked.gigabytes, asked.trials, Path(folder))
    return finish(found, asked.json)


if __name__ == "__main__":
    sys.exit(main())
