"""Ranks that have met, and do not connect: the limit ends each of them, and its line says who is missing."""

import os
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from patience import patient
from played_gpu import play
from tandem.config import Settings
from tandem.distributed.group_store import announce, check_same_kind, open_store, timeout_message
from tandem.distributed.position import Connection, Position, RankStart
from tandem.log import setup
from tandem.rank.session import RankSession

pytestmark = pytest.mark.multi
LIMIT_SECONDS = 120


def position_of(rank: int) -> Position:
    """Of two ranks, each on a node of its own."""
    return Position(rank=rank, world_size=2, node_rank=rank, nodes=2, node_name=f"n{rank}")


def connection_at(port: int) -> Connection:
    """To a store that the test hosts as an agent would."""
    return Connection(store=("127.0.0.1", port, "world"))


def comes_not(rank: int, port: int, kind: str) -> None:
    """A rank that has met the other, and stands still then."""
    position = position_of(rank)
    store = open_store(position, connection_at(port), timedelta(seconds=LIMIT_SECONDS))
    announce(store, position)
    check_same_kind(store, position, kind)
    time.sleep(LIMIT_SECONDS)


def reaches_nobody(*_: Any, **__: Any) -> None:
    """NCCL where no interface leads to the others: it waits in C."""
    time.sleep(LIMIT_SECONDS)


def opens(rank: int, port: int, kind: str, seconds: float, log: Path, is_stuck: bool) -> None:
    torch.set_num_threads(1)
    setup(log, rank, rank, True, False)
    if kind == "cuda":
        play()[0].__enter__()
    if is_stuck:
        torch.distributed.init_process_group = reaches_nobody
    settings = Settings().replace(device=kind, run_dir=log.parent)
    connection = replace(connection_at(port), patience=seconds)
    session = RankSession(settings, RankStart(position_of(rank), connection))
    session.join()
    time.sleep(seconds + 1)  # the limit is that of the start alone
    session.world.sum([1.0])
    os._exit(0)


def ends(*ranks: Any) -> list[int | None]:
    """The exit codes of processes; one that is still there is killed: None."""
    for rank in ranks:
        rank.start()
    deadline = time.monotonic() + patient(60)
    codes = []
    for rank in ranks:
        rank.join(max(0.0, deadline - time.monotonic()))
        codes.append(rank.exitcode)
        rank.kill()
    return codes


@pytest.fixture
def port() -> Any:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port


@pytest.mark.parametrize(("kind", "library"), [("cpu", "gloo"), ("cuda", "NCCL")])
def test_a_rank_that_never_comes_is_named(kind: str, library: str, port: int, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    waits = context.Process(target=opens, args=(0, port, kind, 2.0, tmp_path / "log", False))
    absent = context.Process(target=comes_not, args=(1, port, kind), daemon=True)
    absent.start()
    try:
        assert ends(waits) == [200]
    finally:
        absent.kill()
    [line] = [each for each in (tmp_path / "log").read_text().splitlines() if library in each]
    assert f"{library} has not connected the 2 ranks within 2 s: rank 0 on node 0 (n0) waits" in line
    assert "not begun: rank 1 on node 1 (n1); see the log of that rank" in line


def test_ranks_that_cannot_reach_each_other_all_end(port: int, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    logs = [tmp_path / f"log-{rank}" for rank in (0, 1)]
    ranks = [
        context.Process(target=opens, args=(rank, port, "cuda", patient(5), log, True))
        for rank, log in enumerate(logs)
    ]
    assert ends(*ranks) == [200, 200]
    for rank, log in enumerate(logs):
        text = log.read_text()
        assert f"rank {rank} on node {rank} (n{rank}) waits; begun, but not done: rank {1 - rank}" in text
        assert "NCCL_SOCKET_IFNAME is not set" in text and "NCCL_DEBUG=INFO" in text


def test_ranks_that_have_connected_outlive_the_limit(port: int, tmp_path: Path) -> None:
    context = torch.multiprocessing.get_context("fork")
    seconds = patient(5)
    ranks = [
        context.Process(target=opens, args=(rank, port, "cpu", seconds, tmp_path / f"{rank}", False))
        for rank in (0, 1)
    ]
    assert ends(*ranks) == [0, 0]


def test_of_many_ranks_the_line_names_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    others = [(f"rank {rank} on node 1 (n1)", "begun, but not done") for rank in range(1, 9)]
    line = timeout_message(Position(world_size=9, node_name="n0"), "cuda", 300.0, others)
    assert "within 300 s" in line and "rank 4 on node 1 (n1) and 4 more" in line and "rank 5" not in line
    assert "NCCL_SOCKET_IFNAME is eth7" in line and "\n" not in line
    assert "is not set" in timeout_message(Position(world_size=9), "cpu", 1.0, [])
