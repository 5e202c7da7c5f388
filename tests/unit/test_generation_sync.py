"""What nodes tell each other in a round: waits for it end with what comes meanwhile."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

from tandem.launch.generation_sync import GenerationStore
from tandem.launch.rendezvous import StopRequestedError, StoreLostError


@pytest.fixture
def store() -> PrefixStore:
    asked = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=60)}
    return PrefixStore("round/1", TCPStore("127.0.0.1", 0, **asked))


def nothing() -> None: ...


def test_what_is_there_is_read_without_a_look(store: PrefixStore) -> None:
    def look() -> None:
        pytest.fail("nobody had to wait")

    here = GenerationStore(store, look, 0.005)
    here.multi_set(["a", "b"], ["1", "2"])
    here.set("c", "3")
    assert here.get("c") == b"3" and here.multi_get(["b", "a"]) == [b"2", b"1"]


def test_what_comes_later_is_waited_for(store: PrefixStore) -> None:
    def write() -> None:
        time.sleep(0.1)
        store.set("late", "x")

    writer = threading.Thread(target=write)
    writer.start()
    assert GenerationStore(store, nothing, 0.005).get("late") == b"x"
    writer.join()


def test_a_look_ends_the_wait(store: PrefixStore) -> None:
    looks = iter([nothing, nothing])

    def look() -> None:
        if next(looks, None) is None:
            raise StopRequestedError

    with pytest.raises(StopRequestedError):
        GenerationStore(store, look, 0.005).multi_get(["never", "ever"])


def test_nobody_is_waited_for_longer_than_for_a_read_of_the_store(store: PrefixStore) -> None:
    with pytest.raises(StoreLostError, match="sent nothing for 0.05 s"):
        GenerationStore(store, nothing, 0.005, patience=0.05).get("never")


def test_torchs_engine_gives_ranks_through_it() -> None:
    """By the method that generations.py overrides: node 0 has three ranks, and waits for node 1's word."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assign: Any = SimpleElasticAgent._assign_worker_ranks

    def node(number: int) -> list[tuple[int, int]]:
        time.sleep(0.1 * number)
        own = TCPStore("127.0.0.1", server.port, is_master=False)
        spec = SimpleNamespace(role="default", local_world_size=3 - number)
        workers = assign(None, GenerationStore(PrefixStore("round/2", own), nothing, 0.005), number, 2, spec)
        return [(worker.global_rank, worker.world_size) for worker in workers]

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(node, (0, 1))) == [[(0, 5), (1, 5), (2, 5)], [(3, 5), (4, 5)]]
