"""Ranks that train a small model under fsdp and save as a run does, in processes that a test can kill."""

import os
import queue
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn

from patience import patient
from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.state import weights_sha256
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.config.slices import CheckpointConfig
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.neighbors import NeighborCopies
from tandem.distributed.position import REGIONS, Connection, Position, RankStart
from tandem.training import saving
from tandem.training.resume import ResumePoint, begin
from tandem.training.saving import Saver
from tandem.training.shards import ShardedReading

RECORDER = cast(Any, SimpleNamespace(
    samples=lambda *_: None, event=lambda *_, **__: None, saved=lambda _: None, verified=lambda _: None,
    scores_at=lambda _: None,
))  # fmt: skip
LIMIT_SECONDS = 60.0


class Uneven(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a tied weight, and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 1)
        self.also_last = self.last

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        for block in self.blocks:
            x = x + block(x).relu()
        out: Tensor = self.last(self.norm(x))
        return out


class Trainer:
    """One rank, of any strategy; its state is a `CheckpointSource`."""

    has_per_rank_state = False
    has_rank_0_tensors = False

    def __init__(self, start: RankStart, folder: Path, name: str) -> None:
        self.grant = start.grant
        self.connection = start.connection
        self.world = ProcessGroup.open(start.position, start.connection, torch.device("cpu"), LIMIT_SECONDS)
        settings = Settings()
        self.strategy = strategies.load(name, self.world, settings.exchange, settings.compute)
        torch.manual_seed(3)
        self.model = self.strategy.shard(Uneven())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.store = CheckpointStore(folder / "checkpoints")
        self.step = 0

    def _sharded(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def full_state(self) -> dict[str, Any]:
        return self.strategy.gather_full(self._sharded())

    def local_state(self) -> dict[str, Any]:
        return {**self.strategy.local_state(self._sharded()), "data": {"epoch": 3}}

    def checkpoint_extras(self, _recorder: Any, _step: int) -> dict[str, Any]:
        return {}

    def rank_0_indices(self, _state: Any) -> frozenset[int]:
        return frozenset()

    def begins(self) -> ResumePoint:
        # Facts of a whole run, which these ranks do not have.
        saving.manifest_info = lambda _facts, step, scores, *_: {"step": step, "eval": dict(scores)}
        has_shards = self.strategy.shards_parameters
        shards = ShardedReading(self.world, self.strategy.rows) if has_shards else None
        found = begin(self.world, self.store, CheckpointConfig(), self.grant, RECORDER, False,
                      shards=shards)  # fmt: skip
        self.step = found.step
        if found.state is not None:
            state = self.strategy.with_shards(found.state)
            assert state["step"] == found.step
            self.strategy.load_model(self.model, state["model"])
            self.strategy.load_optimizer(self.optimizer, state["optimizer"])
        self.copies = None
        if has_shards and self.world.position.nodes > 1:
            self.copies = NeighborCopies.open(self.world, self.connection, self.grant, found.held)
        self.saver = Saver(
            CheckpointConfig(),
            cast(Any, SimpleNamespace(
                directory=SimpleNamespace(checkpoints=self.store, push=lambda: None), world=self.world
            )),
            self, RECORDER, self.grant, None, found.own_slot, found.generation, has_shards,
            self.copies,
        )  # fmt: skip
        return found

    def takes_snapshot(self) -> None:
        """Copy it to the next node, if no rank still copies; a run's step tells that to all ranks."""
        may_copy = self.world.sum([self.saver.is_copying])[0] == 0
        self.saver.snapshot(self.step, has_lines=False, may_copy=may_copy)

    def waits_for_copies(self) -> None:
        """Until all ranks' copies are complete."""
        while self.world.sum([self.saver.is_copying])[0]:
            time.sleep(0.01)

    def takes_step(self) -> None:
        """The same global batch for any number of ranks and any strategy that shards."""
        self.step += 1
        x = torch.randn(24, 6, generator=torch.Generator().manual_seed(self.step))
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> str:
        return weights_sha256(self.strategy.gather_full(self.model.state_dict()))


Work = Callable[[Trainer, Any], object]


def _rank(work: Work, start: RankStart, folder: Path, name: str, argument: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    trainer = Trainer(start, folder, name)
    answers.put((start.position.rank, work(trainer, argument)))
    answers.close()
    answers.join_thread()
    trainer.world.close()
    os._exit(0)


def memories_of(ranks: int) -> list[NodeMemory]:
    """The memory of a node with that many ranks: their shared regions, then their own, then copies."""
    return [NodeMemory() for _ in range(REGIONS * ranks)]


def _position(rank: int, size: int, nodes: int) -> Position:
    each = size // nodes
    return Position(
        rank=rank, local_rank=rank % each, world_size=size, local_world_size=each, node_rank=rank // each,
        nodes=nodes, ranks_on_host=size,
    )  # fmt: skip


def in_ranks(
    work: Work, folder: Path, size: int, argument: Any = None, name: str = "fsdp",
    memories: Sequence[NodeMemory] = (), killed: Sequence[int] = (), kept: Sequence[int] = (),
    nodes: Sequence[Sequence[NodeMemory]] = (),
) -> list[Any]:  # fmt: skip
    """One generation of ranks on one node; what `work(trainer, argument)` returns, by rank.

    `nodes`: the memories of each node, if there are several.

    With `killed`, those ranks kill themselves and the others may fail, as they do under an agent. With
    `kept`, only these ranks answer.
    """
    context = torch.multiprocessing.get_context("fork")
    answers = context.Queue()
    meeting = folder / f"meeting-{os.urandom(4).hex()}"
    connection = Connection(init=f"file://{meeting}")
    ranks = []
    for rank in range(size):
        start = RankStart(_position(rank, size, len(nodes) or 1), connection)
        here = nodes[start.position.node_rank] if nodes else memories
        arguments = work, start.with_memories(here), folder, name, argument, answers
        ranks.append(context.Process(target=_rank, args=arguments))
    for process in ranks:
        process.start()
    try:
        if killed:
            for rank in killed:
                ranks[rank].join(patient(LIMIT_SECONDS))
                assert ranks[rank].exitcode == -signal.SIGKILL, (rank, ranks[rank].exitcode)
            return []
        found = dict[int, Any]()
        while not (set(kept) or set(range(size))) <= found.keys():
            with suppress(queue.Empty):
                found.update([answers.get(timeout=1)])
            assert kept or not any(process.exitcode for process in ranks), "a rank failed; see its traceback"
        return [found[rank] for rank in kept or range(size)]
    finally:
        for process in ranks:
            process.join(2 if killed or kept else 10)
            process.kill()
            process.join()


def killed_here() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
