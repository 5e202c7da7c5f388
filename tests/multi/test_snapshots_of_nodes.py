"""Every node keeps snapshots: which one counts, who receives it, and what rank 0's values cost."""

import dataclasses
import queue
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.state import serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config.slices import CheckpointConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import REGIONS, Connection, Grant, Position
from tandem.distributed.whole_state import SMALL_BYTES, Rank0Values
from tandem.training.resume import ResumePoint, begin
from tandem.training.saving import Saver

pytestmark = [pytest.mark.multi, pytest.mark.timeout(120)]

LIMIT_SECONDS = 60.0
RANKS = 3
RECORDER = cast(
    Any,
    SimpleNamespace(samples=lambda *_: None, event=lambda *_, **__: None, saved=None, verified=None),
)


class Learner:
    """Weights that are equal on all ranks, and running statistics of each rank (`CheckpointSource`)."""

    has_per_rank_state = False

    def __init__(self, rank: int, differs: bool = True) -> None:
        self.rank, self.has_rank_0_tensors = rank, differs
        self.step = 0

    def full_state(self) -> dict[str, Any]:
        own = {"mean": torch.full((3,), 10.0 * self.step + self.rank)} if self.has_rank_0_tensors else {}
        return {"model": {"w": torch.full((5, 7), float(self.step)), **own}}

    def rank_0_indices(self, state: Any) -> frozenset[int]:
        return frozenset({1} if self.has_rank_0_tensors else ())


class Node:
    """One rank as a node of its own, whose memory outlives the generations."""

    def __init__(self, rank: int, folder: Path) -> None:
        self.store = CheckpointStore(folder / "checkpoints")
        self.position = Position(rank=rank, world_size=RANKS, node_rank=rank, nodes=RANKS)
        connection = Connection(init=f"file://{folder / 'meeting'}")
        self.world = ProcessGroup.open(self.position, connection, torch.device("cpu"), LIMIT_SECONDS)
        self.loses_memory()

    def loses_memory(self) -> None:
        self.grant = Grant(memories=tuple(NodeMemory() for _ in range(REGIONS)))

    def begins(self, restart: int = 1, resume: str = "auto") -> ResumePoint:
        grant = dataclasses.replace(self.grant, restart=restart)
        config = CheckpointConfig(resume=resume)
        return begin(self.world, self.store, config, grant, RECORDER, False)

    def saver(self, learner: Learner, found: ResumePoint) -> Saver:
        directory = SimpleNamespace(checkpoints=self.store, push=None)
        facts = cast(Any, SimpleNamespace(directory=directory, world=self.world))
        slots = found.slot, None
        return Saver(CheckpointConfig(), facts, learner, RECORDER, self.grant, *slots, found.generation)

    def trains(self, found: ResumePoint, until: int) -> None:
        learner = Learner(self.world.rank)
        saver = self.saver(learner, found)
        for learner.step in range(found.step + 1, until + 1):
            saver.snapshot(learner.step, has_lines=False)


def of_rank_zero(found: ResumePoint, step: int) -> bool:
    assert found.state is not None
    model = found.state["model"]
    return found.step == step and bool((model["w"] == step).all() and (model["mean"] == 10 * step).all())


def calls_of(action: Callable[[], object]) -> int:
    """The collectives in `action`."""
    names = [name for name in ("broadcast", "all_reduce", "all_gather", "send", "recv")]
    before = {name: getattr(dist, name) for name in names}
    called = list[str]()

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            called.append(name)
            return before[name](*args, **more)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        action()
    finally:
        for name in names:
            setattr(dist, name, before[name])
    return len(called)


def recovers(node: Node) -> dict[str, Any]:
    """Lose one node after the other, then none."""
    rank = node.world.rank
    step = 0
    for lost in (0, 1, 2, None):
        node.trains(node.begins(), step + 2)
        step += 2
        if rank == lost:
            node.loses_memory()
        found = node.begins()
        assert of_rank_zero(found, step)
        is_lost = rank == lost
        source = 1 if lost == 0 else 0
        assert found.source == (f"memory of node {source}" if is_lost else "memory of this node")
        assert found.is_from_memory and (found.slot is None) == is_lost
    # Without a loss, only what ranks tell each other is sent: two messages of two calls.
    return {"calls": calls_of(node.begins)}


def chooses(node: Node) -> dict[str, Any]:
    rank = node.world.rank
    node.trains(node.begins(), 4)
    # Another past of the same step, from a time when this node was alone.
    if rank == 2:
        alone = Saver(
            CheckpointConfig(),
            cast(Any, SimpleNamespace(
                directory=SimpleNamespace(checkpoints=node.store, push=None),
                world=SimpleNamespace(position=dataclasses.replace(node.position, nodes=1), is_first=False),
            )),
            wrong := Learner(7), RECORDER, node.grant, None, None, 5,
        )  # fmt: skip
        wrong.step = 4
        alone.snapshot(4, has_lines=False)
    found = node.begins()
    assert of_rank_zero(found, 4) and (found.slot is None) == (rank == 2)
    # A rank was killed before its snapshot of this step, and another node has it.
    newer = node.saver(learner := Learner(0), found)
    newer._from_rank_0 = None
    learner.step = 5
    if rank == 1:
        newer.snapshot(5, has_lines=False)
    found = node.begins()
    assert of_rank_zero(found, 5)
    assert found.source == ("memory of this node" if rank == 1 else "memory of node 1")
    # A checkpoint that is newer counts; as new as the snapshot, it is not read.
    for step in (5, 6):
        if rank == 0:
            state = {"model": {"w": torch.full((5, 7), float(step)), "mean": torch.full((3,), 10.0 * step)}}
            node.store.save(step, serialize({**state, "step": step}), {})
        node.world.sum([0.0])
        found = node.begins()
        assert of_rank_zero(found, step) and found.is_from_memory == (step == 5)
        assert step == 5 or (found.source == "checkpoint" and found.slot is None)
    # A start with --resume never ignores the snapshots that nodes still have.
    node.store = CheckpointStore(node.store.directory.with_name("others"))
    assert node.begins(restart=1, resume="never").step == 5, "this launch has trained so far"
    assert node.begins(restart=0, resume="never").step == 0
    assert node.begins().step == 0
    return {}


def sends(node: Node) -> dict[str, Any]:
    """What it costs to keep the values that only rank 0 has."""
    rank = node.world.rank
    found = node.begins()
    plain, statistics = (node.saver(Learner(rank, differs), found) for differs in (False, True))
    calls = {
        "plain": calls_of(lambda: plain.snapshot(1, has_lines=False)),
        "plain with lines": calls_of(lambda: plain.snapshot(2, has_lines=True)),
    }
    statistics.snapshot(1, has_lines=False)
    calls["statistics"] = calls_of(lambda: statistics.snapshot(2, has_lines=True))
    values = Rank0Values(node.world)
    for size in (1, 4, 2):  # rank 0's buffers grow and shrink; rank 2 has another form
        theirs = [torch.full((size + (rank == 2),), float(rank)), torch.tensor(rank), torch.zeros(0, 3)]
        assert values.is_due()
        got = values.send(theirs)
        assert (got is None) == (rank == 2)
        for mine, right in zip(got or [], theirs, strict=bool(got)):
            assert mine.dtype == right.dtype and mine.shape == right.shape and not mine.any()
    large = Rank0Values(node.world)
    sent = list[int]()
    for step in range(40):
        if large.is_due():
            sent.append(step)
            assert large.send([torch.zeros(SMALL_BYTES)]) is not None
    return {**calls, "sent": sent}


def work(rank: int, what: Callable[[Node], dict[str, Any]], folder: Path, answers: Any) -> None:
    torch.set_num_threads(1)
    node = Node(rank, folder)
    answers.put((rank, what(node)))
    node.world.close()


def in_nodes(what: Callable[[Node], dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    context = torch.multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, what, folder, answers)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    try:
        found = dict[int, dict[str, Any]]()
        while len(found) < RANKS:
            with suppress(queue.Empty):
                rank, said = answers.get(timeout=1)
                found[rank] = said
            assert not any(process.exitcode for process in ranks), "a rank failed; see its traceback"
        return [found[rank] for rank in range(RANKS)]
    finally:
        for process in ranks:
            process.join(10)
            process.kill()


def test_any_node_may_lose_its_memory(tmp_path: Path) -> None:
    assert [each["calls"] for each in in_nodes(recovers, tmp_path)] == [4] * RANKS


def test_the_newest_snapshot_of_this_launch_counts(tmp_path: Path) -> None:
    in_nodes(chooses, tmp_path)


def test_a_model_without_buffers_sends_nothing_and_large_ones_are_sent_rarely(tmp_path: Path) -> None:
    first, *others = in_nodes(sends, tmp_path)
    assert (first["plain"], first["plain with lines"], first["statistics"]) == (0, 1, 1)
    assert all(each == first for each in others) and first["sent"][:2] == [0, 1] and len(first["sent"]) < 40
