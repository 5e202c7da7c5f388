"""Copies of slots on the way to the next node: what arrives as a whole counts, and nothing else does."""

import ipaddress
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch

from patience import patient
from tandem.checkpoint import snapshot as snapshot_module
from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.slot_copies import IncomingSlot, SlotHead, bytes_of, head_of, held_slots
from tandem.checkpoint.snapshot import OF, Snapshots, read_slot, whole_slots
from tandem.distributed.neighbor_link import (
    HEAD,
    CopyReceiver,
    CopySender,
    OutgoingCopy,
    own_address,
)
from tandem.distributed.neighbors import NeighborCopies, neighbor_of

pytestmark = pytest.mark.timeout(120)


class Rank:
    """A rank's own region, with copies in a region of another node."""

    def __init__(self, values: int = 1000) -> None:
        self.there = NodeMemory()
        self.receiver = CopyReceiver(self.there, None, "127.0.0.1")
        self.own = NodeMemory()
        self.snapshots = Snapshots([self.own], 0, None, 7, 1, NodeMemory())
        self.values = values
        self.sender = CopySender(self.receiver.address, "cpu")

    def takes(self, step: int) -> OutgoingCopy:
        self.snapshots.take(step, {"model": {"w": torch.full((self.values,), float(step))}, OF: [1, 3]}, ())
        slot = self.snapshots.slot
        head = head_of(self.own, slot)
        contents = bytes_of(self.snapshots.memory, slot, head)
        return OutgoingCopy(head, contents, lambda: head_of(self.own, slot) == head)

    def steps_there(self) -> list[int]:
        return sorted(held.step for held in held_slots(self.there))


@pytest.fixture
def rank() -> Iterator[Rank]:
    made = Rank()
    yield made
    made.sender.close()
    made.receiver.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def sends(rank: Rank, copy: OutgoingCopy) -> None:
    rank.sender.send(copy)
    until(lambda: not rank.sender.is_busy)


def test_the_last_two_copies_are_kept_as_they_were(rank: Rank) -> None:
    rank.sender.open()
    for step in (1, 2, 3):
        sends(rank, rank.takes(step))
    assert rank.steps_there() == [2, 3]
    for step, (number, generation) in whole_slots([rank.there]).items():
        found = read_slot([rank.there], step, number)
        assert generation == 7 and bool((found.state["model"]["w"] == step).all())


def test_a_slot_that_is_overwritten_while_it_is_sent_does_not_count(rank: Rank) -> None:
    rank.sender.open()
    sends(rank, rank.takes(1))
    torn = rank.takes(2)._replace(is_whole=lambda: False)
    sends(rank, torn)
    assert rank.steps_there() == [1]
    sends(rank, rank.takes(3))
    assert rank.steps_there() == [1, 3], "the last whole copy was not overwritten"


def test_a_larger_state_replaces_the_copies_of_the_smaller_one(rank: Rank) -> None:
    rank.sender.open()
    sends(rank, rank.takes(1))
    rank.values = 300_000
    sends(rank, rank.takes(2))
    assert rank.steps_there() == [2]


def test_a_broken_connection_is_opened_again_for_the_same_copy(rank: Rank) -> None:
    rank.sender.open()
    sends(rank, rank.takes(1))
    assert rank.receiver._connection is not None
    rank.receiver._connection.shutdown(socket.SHUT_RDWR)
    sends(rank, rank.takes(2))
    assert rank.steps_there() == [1, 2]


@pytest.mark.parametrize("words", [b"", b"x" * 32, b"GET / HTTP/1.1\r\nHost: somewhere.example\r\n\r\n"])
def test_whoever_does_not_know_the_token_writes_nothing(rank: Rank, words: bytes) -> None:
    head = rank.takes(1).head
    with socket.create_connection(rank.receiver.address[:2]) as stranger, suppress(OSError):
        stranger.sendall(words + HEAD.pack(*head) if words else b"")
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(patient(20))
        assert stranger.recv(1) == b"", "closed without an answer"
    assert rank.steps_there() == []
    rank.sender.open()
    sends(rank, rank.takes(2))
    assert rank.steps_there() == [2]


def test_a_node_without_memory_for_a_copy_ends_all_copies(
    rank: Rank, caplog: pytest.LogCaptureFixture
) -> None:
    rank.sender.open()
    impossible = rank.takes(1)
    rank.sender.send(impossible._replace(head=impossible.head._replace(slot_bytes=1 << 62)))
    until(lambda: not rank.sender._thread.is_alive())
    assert rank.sender.is_busy, "so no rank begins a copy"
    assert "one has too little memory" in caplog.text


def test_nobody_answers(rank: Rank) -> None:
    rank.receiver.close()
    with pytest.raises(OSError, match="refused"):
        rank.sender.open()


@pytest.mark.parametrize("head", [
    SlotHead(1, 0, 7, 64, 128), SlotHead(1, 5, 7, 0, 128), SlotHead(1, 5, 7, 256, 128),
])  # fmt: skip
def test_a_head_that_makes_no_sense_is_refused(head: SlotHead) -> None:
    with pytest.raises(ValueError, match="not a slot"):
        IncomingSlot(NodeMemory(), 0, head)


def test_the_slots_that_a_copy_needs_are_not_overwritten(rank: Rank) -> None:
    copies = NeighborCopies(rank.receiver, rank.sender, None)

    def takes(step: int, may_copy: bool) -> set[int]:
        if may_copy:
            copies.begin(rank.snapshots)
        rank.takes(step)
        if may_copy:
            copies.send(rank.snapshots)
        return set(whole_slots([rank.own]))

    assert takes(1, True) == {1}
    assert takes(2, True) == {1, 2}
    assert takes(3, False) == {1, 2, 3}
    assert takes(4, False) == {1, 2, 4}, "the copies of step 2 are not complete, so step 1 is needed"
    assert takes(5, True) == {2, 4, 5}, "all have copies of step 2"
    assert takes(6, True) >= {5, 6}


def test_too_little_memory_for_copies_leaves_the_snapshots(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rank: Rank
) -> None:
    rank.values = 100_000
    monkeypatch.setattr(snapshot_module, "memory_left", lambda _: 3 * 400_000 + 100_000)
    rank.takes(1)
    assert rank.snapshots.slots == 2 and "no node keeps copies" in caplog.text
    copies = NeighborCopies(rank.receiver, rank.sender, None)
    copies.send(rank.snapshots)
    assert copies.is_busy and rank.steps_there() == []


def test_the_ring_has_one_rank_of_each_node() -> None:
    places = [(0, 0), (0, 1), (1, 0), (1, 1), (4, 0), (4, 1)]
    assert [neighbor_of(rank, places) for rank in range(6)] == [2, 3, 4, 5, 0, 1]
    assert neighbor_of(0, [(0, 0), (0, 1), (1, 0)]) is None, "nodes with different numbers of ranks"


def test_ranks_listen_where_gloo_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_address("lo", None) == "127.0.0.1"
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-host.invalid")
    assert ipaddress.ip_address(own_address("", "127.0.0.1")).is_loopback
    assert ipaddress.ip_address(own_address("no-such-interface", None)).is_loopback
