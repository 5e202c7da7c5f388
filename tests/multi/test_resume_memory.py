"""A resume holds the state once on each rank: it is broadcast a tensor at a time, into memory made for it."""

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Connection, Position
from tandem.distributed.whole_state import broadcast_state

pytestmark = pytest.mark.multi

LIMIT_SECONDS = 100.0
MIB = 2**20
STATE_MIB, TENSORS = 256, 4


def small() -> dict[str, Any]:
    """One of each: types, no dimension, no element, out of order, tied, and what is no tensor."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(6, 5, generator=generator)
    return {
        "model": {"weight": weight, "turned": weight.t(), "tied": weight, "half": weight.bfloat16()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"params": [0]}]},
        "mask": torch.tensor([True, False]), "none": torch.empty(0, 3), "count": torch.tensor(2**60 + 1),
        "waves": torch.tensor([1 + 2j]), "words": ["a", (1, None)], "step": 7,
    }  # fmt: skip


def large() -> dict[str, Any]:
    each = STATE_MIB * MIB // 4 // TENSORS
    return {"model": {str(index): torch.full((each,), float(index)) for index in range(TENSORS)}}


def work(rank: int, meeting: str, answers: Any) -> None:
    torch.set_num_threads(1)
    position = Position(rank=rank, local_rank=rank, world_size=2)
    connection = Connection(init=f"file://{meeting}")
    world = ProcessGroup.open(position, connection, torch.device("cpu"), LIMIT_SECONDS)
    same = _same(broadcast_state(world, small() if rank == 0 else None, {}), small())
    whole = large() if rank == 0 else None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    state = broadcast_state(world, whole, {})
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    same = same and all(bool((tensor == int(name)).all()) for name, tensor in state["model"].items())
    destinations = {name: torch.zeros_like(tensor) for name, tensor in state["model"].items() if name != "2"}
    state = broadcast_state(world, whole, destinations)
    same = same and all(bool((tensor == int(name)).all()) for name, tensor in state["model"].items())
    same = same and all((state["model"][name] is there) == (rank > 0) for name, there in destinations.items())
    answers.put((rank, same, grown / (STATE_MIB * MIB)))
    world.close()


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return found.dtype == expected.dtype and torch.equal(found, expected)
    if isinstance(expected, dict):
        return list(found) == list(expected) and all(_same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list | tuple):
        return type(found) is type(expected) and all(map(_same, found, expected))
    return bool(found == expected)


def test_a_state_is_there_once_on_each_rank(tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    answers = context.Queue()
    ranks = [context.Process(target=work, args=(rank, str(tmp_path / "meeting"), answers)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    try:
        found = sorted(answers.get(timeout=LIMIT_SECONDS) for _ in ranks)
    finally:
        for process in ranks:
            process.join(10)
            process.kill()
    assert [(rank, same) for rank, same, _ in found] == [(0, True), (1, True)]
    (_, _, first), (_, _, other) = found
    assert first < 0.3 and other < 1.3, f"{first:.2f} states more on rank 0, {other:.2f} on rank 1"
