"""Errors of stores: of the job's, another rank is lost; of one of the program's own, it has failed."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from tandem.distributed.peers import is_gpu_failure, is_peer_loss
from tandem.text import first_line, in_one_line, one_line

SHORT = timedelta(seconds=0.5)


class Cache:
    """A store two levels below a name, as programs keep one."""

    def __init__(self, store: Any) -> None:
        self.stores = {"a": dist.PrefixStore("cache", store)}

    def read(self) -> object:
        return self.stores["a"].get("never")


@pytest.fixture(scope="module")
def own_and_jobs() -> Iterator[tuple[Any, Any]]:
    """A store of the program's own, and the one that its group was opened with."""
    own, jobs = (dist.TCPStore("127.0.0.1", 0, 1, True, timeout=SHORT) for _ in range(2))
    dist.init_process_group("gloo", store=jobs, rank=0, world_size=1)
    dist.distributed_c10d._get_default_store().set_timeout(SHORT)
    yield own, jobs
    dist.destroy_process_group()


def wrapped(store: Any) -> None:
    try:
        store.get("never")
    except dist.DistStoreError as error:
        raise ValueError("the cache is empty") from error


def grouped(store: Any) -> None:
    try:
        store.get("never")
    except dist.DistStoreError as error:
        raise ExceptionGroup("of tasks", [KeyError("x"), error]) from None


@pytest.mark.parametrize(
    "use",
    [
        lambda store: store.get("never"),
        lambda store: Cache(store).read(),
        lambda store: dist.ProcessGroupGloo(dist.PrefixStore("own", store), 0, 2, SHORT),
        wrapped,
        grouped,
    ],
    ids=["get", "an attribute", "a group", "a cause", "a group of errors"],
)
def test_store_errors_it_was_decides(own_and_jobs: tuple[Any, Any], use: Callable[[Any], None]) -> None:
    own, jobs = own_and_jobs
    client = dist.TCPStore("127.0.0.1", jobs.port, 1, False, timeout=SHORT)
    for store, lost in ((own, False), (jobs, True), (client, True)):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            use(store)
        assert is_peer_loss(caught.value, 2) is lost, caught.value


@pytest.mark.parametrize(
    "host, port, serves, lost",
    [("127.0.0.1", 1, False, False), ("no.such.host.invalid", 0, False, False), ("127.0.0.1", 0, True, True)],
)
def test_an_address_tells_whose_store_cannot_be_reached(
    own_and_jobs: tuple[Any, Any], host: str, port: int, serves: bool, lost: bool
) -> None:
    """The port of the job's store on another host is another's, too."""
    with pytest.raises(dist.DistNetworkError) as caught:
        dist.TCPStore(host, port or own_and_jobs[1].port, 1, serves, timeout=SHORT)
    assert is_peer_loss(caught.value, 2) is lost, caught.value


class Unspeakable(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no text")


def test_an_error_without_a_text_is_the_programs_own() -> None:
    assert not is_peer_loss(Unspeakable(), 2) and not is_gpu_failure(Unspeakable())
    assert first_line(Unspeakable()) and in_one_line(Unspeakable()) and one_line(Unspeakable())
