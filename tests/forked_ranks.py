"""Run a function in ranks that are forked from this process and connected by gloo."""

import faulthandler
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from patience import patient
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Connection, Position

LIMIT_SECONDS = 200.0
STACK_SECONDS = 120.0
"""A rank that has not ended by then writes its stack to its file, which a test that fails shows."""


def on_one_node(rank: int, size: int) -> Position:
    return Position(rank=rank, local_rank=rank, world_size=size)


def in_ranks(
    what: Callable[[ProcessGroup], Any],
    size: int,
    port: int,
    folder: Path,
    position_of: Callable[[int, int], Position] = on_one_node,
) -> list[Any]:
    """Return what each rank's `what(group)` returned, saved by torch in `folder` in between."""
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_work, args=(what, position_of(rank, size), port, folder))
        for rank in range(size)
    ]
    for rank in ranks:
        rank.start()
    try:
        deadline = time.monotonic() + patient(LIMIT_SECONDS)
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        assert [rank.exitcode for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
        for path in sorted(folder.glob("*.stack")):
            print(f"{path.name}:\n{path.read_text()}")
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _work(what: Callable[[ProcessGroup], Any], position: Position, port: int, folder: Path) -> None:
    stack = (folder / f"{position.rank}.stack").open("w")
    faulthandler.dump_traceback_later(STACK_SECONDS, file=stack)
    torch.set_num_threads(1)
    init = "master" if position.world_size > 1 else "alone"
    connection = Connection(init=init, master=("127.0.0.1", port))
    group = ProcessGroup.open(position, connection, torch.device("cpu"), LIMIT_SECONDS)
    torch.save(what(group), folder / f"{position.rank}.pt")
    group.sum([0.0])
    os._exit(0)
