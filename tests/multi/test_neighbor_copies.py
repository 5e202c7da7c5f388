"""Each node keeps a copy of the previous node's shards: any one of them may be lost, with its memory."""

import threading
from pathlib import Path
from typing import Any

import pytest
from sharded_ranks import Trainer, in_ranks, killed_here, memories_of

from needs import require_strategy
from tandem.distributed import neighbor_link
from tandem.distributed.neighbor_link import CopySender, OutgoingCopy

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]


@pytest.fixture(autouse=True)
def _on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    require_strategy("fsdp")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def trains(trainer: Trainer, until: int) -> dict[str, Any]:
    """Train until a step, of which the next nodes then have copies."""
    found = trainer.begins()
    while trainer.step < until:
        trainer.takes_step()
        trainer.takes_snapshot()
        trainer.waits_for_copies()
    return {"first": found.step, "source": found.source, "weights": trainer.weights()}


def the_same(ended: list[dict[str, Any]], key: str) -> Any:
    (value,) = {each[key] for each in ended}
    return value


CALM: dict[int, str] = {}


def weights_of_a_calm_run(folder: Path, until: int) -> str:
    """The weights of three ranks, at a step of a run in which nothing was lost."""
    if until not in CALM:
        memories = [memories_of(1) for _ in range(3)]
        CALM[until] = in_ranks(trains, folder, 3, until, nodes=memories)[0]["weights"]
    return CALM[until]


@pytest.mark.parametrize(("nodes", "each"), [(3, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_any_node_may_lose_its_memory(tmp_path: Path, nodes: int, each: int) -> None:
    size = nodes * each
    memories = [memories_of(each) for _ in range(nodes)]
    in_ranks(trains, tmp_path, size, 2, nodes=memories)
    for lost in range(nodes):
        memories[lost] = memories_of(each)
        ended = in_ranks(trains, tmp_path, size, 3 + lost, nodes=memories)
        assert the_same(ended, "first") == 2 + lost
        assert the_same(ended, "source") == f"memory of node {(lost + 1) % nodes}"
    if size == 3:
        assert ended[0]["weights"] == weights_of_a_calm_run(tmp_path, 5)


def test_a_node_and_its_neighbor_are_lost_but_not_two_others(tmp_path: Path) -> None:
    memories = [memories_of(1) for _ in range(4)]
    in_ranks(trains, tmp_path, 4, 2, nodes=memories)
    memories[0], memories[2] = memories_of(1), memories_of(1)
    ended = in_ranks(trains, tmp_path, 4, 4, nodes=memories)
    assert (the_same(ended, "first"), the_same(ended, "source")) == (2, "memory of nodes 1, 3")
    memories[1], memories[2] = memories_of(1), memories_of(1)
    assert the_same(in_ranks(trains, tmp_path, 4, 2, nodes=memories), "first") == 0, "there is no checkpoint"


def test_nodes_that_have_changed_places_send_each_other_their_shards(tmp_path: Path) -> None:
    """With spares, a node can come back at another place."""
    memories = [memories_of(1) for _ in range(3)]
    before = in_ranks(trains, tmp_path, 3, 2, nodes=memories)
    ended = in_ranks(trains, tmp_path, 3, 2, nodes=[memories[1], memories[2], memories[0]])
    assert the_same(ended, "first") == 2 and ended[0]["weights"] == before[0]["weights"]


def dies(trainer: Trainer, where: tuple[int, int, str]) -> None:
    """Train with complete copies, and be killed at a step while half of its copy is sent or received."""
    rank, last, what = where
    trainer.begins()

    def sends_half(_sender: CopySender, connection: Any, copy: OutgoingCopy) -> None:
        connection.sendall(copy.contents[: len(copy.contents) // 2])
        killed_here()

    def receives_half(connection: Any, memory: memoryview) -> None:
        if len(memory) > neighbor_link.HEAD.size:
            connection.recv_into(memory[: len(memory) // 2])
            killed_here()
        fill(connection, memory)

    fill = neighbor_link.receive_into
    while True:
        trainer.takes_step()
        if (trainer.world.rank, trainer.step) == (rank, last):
            if what == "sends":
                CopySender._send_contents = sends_half  # type: ignore[method-assign]
            else:
                neighbor_link.receive_into = receives_half
        trainer.takes_snapshot()
        trainer.waits_for_copies()


def test_a_torn_copy_is_never_loaded(tmp_path: Path) -> None:
    memories = [memories_of(1) for _ in range(3)]
    for rank, last, what in ((1, 3, "sends"), (2, 5, "receives")):
        in_ranks(dies, tmp_path, 3, (rank, last, what), nodes=memories, killed=[rank])
        memories[rank] = memories_of(1)
        ended = in_ranks(trains, tmp_path, 3, last, nodes=memories)
        # What the killed node sent counts only as a whole. What it received was not its own.
        first = the_same(ended, "first")
        assert first == last - 1 or (what == "receives" and first == last), first
        assert the_same(ended, "source") == f"memory of node {(rank + 1) % 3}"
    assert ended[0]["weights"] == weights_of_a_calm_run(tmp_path, 5)


def never_copies(trainer: Trainer, complete: int) -> int:
    """Train with complete copies to a step, and three steps more without any of rank 1; the first step."""
    found = trains(trainer, complete)
    if trainer.world.rank == 1:
        CopySender._send_contents = lambda *_: threading.Event().wait()  # type: ignore[method-assign]
    for _ in range(3):
        trainer.takes_step()
        trainer.takes_snapshot()
    return int(found["first"])


def test_snapshots_go_on_while_a_copy_is_under_way(tmp_path: Path) -> None:
    memories = [memories_of(1) for _ in range(3)]
    in_ranks(never_copies, tmp_path, 3, 3, nodes=memories)
    ended = in_ranks(never_copies, tmp_path, 3, 0, nodes=memories)
    assert ended == [6, 6, 6], "restarted ranks find the last snapshot"
    memories[1] = memories_of(1)
    ended = in_ranks(trains, tmp_path, 3, 5, nodes=memories)
    assert the_same(ended, "first") == 3, "the last step of which all copies are complete"
    assert ended[0]["weights"] == weights_of_a_calm_run(tmp_path, 5)


def test_a_newer_checkpoint_counts(tmp_path: Path) -> None:
    memories = [memories_of(1) for _ in range(2)]
    in_ranks(trains, tmp_path, 2, 3, nodes=memories)
    in_ranks(saves_later, tmp_path, 2, nodes=memories)
    memories[1] = memories_of(1)
    ended = in_ranks(lambda trainer, _: trainer.begins().source, tmp_path, 2, nodes=memories)
    assert ended == ["checkpoint"] * 2


def saves_later(trainer: Trainer, _: Any) -> None:
    trainer.begins()
    trainer.takes_step()
    trainer.saver.save(trainer.step)
    trainer.saver._writer.wait()
