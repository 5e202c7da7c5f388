"""The store on an object store does what it does in a folder; two writers, and a damaging network."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from servers import SERVERS, ObjectServer

from tandem.checkpoint.decision import checkpoints_of, locate
from tandem.checkpoint.listing import list_checkpoints
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.sharded import divided, file_name, read_rows, read_state, shard, write_parts
from tandem.checkpoint.state import serialize
from tandem.checkpoint.storage import _cached_remote, remote_at
from tandem.checkpoint.storage.lease_records import lease_records_at
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import address
from tandem.errors import CheckpointError, ConfigError, RunTakenError
from tandem.run.lease import LeaseRecord, acquire, fence
from tandem.training.shards import check_shared
from trials.store import newest_valid

pytestmark = pytest.mark.timeout(300)

STATE = bytes(range(256)) * 4096 * 6  # more than one part


def no_corruption(step: int, problem: str) -> None:
    raise AssertionError(f"step {step}: {problem}")


def damage(store: CheckpointStore, step: int) -> None:
    (name,) = store.manifest(step)["files"]
    store._storage.write(store.path(step) / name, b"rotten")  # type: ignore[attr-defined]


def test_an_address_survives_being_taken_for_a_path() -> None:
    for text in ("s3://bucket/a/b", "s3:/bucket/a/b"):
        where = address(text)
        assert str(where) == "s3://bucket/a/b" and str(where / "c") == "s3://bucket/a/b/c"
        assert address(where) == where == address(Path(text)) and where.name == "b"
    assert address("runs/x") == Path("runs/x")


@pytest.mark.parametrize(
    "scheme, module, install",
    [("s3", "s3fs", "'tandem-train[s3]'"), ("gs", "gcsfs", "gcsfs"), ("az", "adlfs", "adlfs")],
)
def test_a_missing_library_is_one_line(
    monkeypatch: pytest.MonkeyPatch, scheme: str, module: str, install: str
) -> None:
    _cached_remote.cache_clear()
    monkeypatch.setitem(sys.modules, module, None)
    known = importlib.import_module("fsspec.registry")._registry
    monkeypatch.delitem(known, scheme, raising=False)
    with pytest.raises(ConfigError, match=f"{scheme}:// needs a library that") as caught:
        CheckpointStore(address(f"{scheme}://bucket/run"))
    assert str(caught.value).endswith(install) and "\n" not in str(caught.value)


def test_a_sharded_life_on_an_object_store(store_address: str) -> None:
    where = address(f"{store_address}/checkpoints")
    store = CheckpointStore(where)
    values = torch.arange(21.0).view(7, 3)

    def save(step: int, ranks: int, publishes: bool = True) -> None:
        pending = store.begin(step)
        files = {}
        for rank in range(ranks):
            other = CheckpointStore(where)  # of another node
            rows = values[rank::ranks][:0] if rank else values  # rank 0 has them all
            rest, parts = divided({"model": {"w": shard((7, 3), 0, rows)}})
            index = dict[str, Any]()
            name, entry = other.add(
                other.pending(pending.name), file_name(rank, ranks),
                lambda sink, parts=parts, index=index: index.update(write_parts(parts, sink)),
            )  # fmt: skip
            files[name] = {**entry, **index}
        name, entry = store.add(pending, "state.pt", serialize({**rest, "step": step}))
        if publishes:
            store.publish(step, pending, {**files, name: entry}, {})

    save(1, 2)
    save(2, 3, publishes=False)
    assert store.steps() == [1] and store.without_manifest() == []
    save(2, 3)
    store.verify(2)
    assert len(store.manifest(2)["files"]) == 4
    assert torch.equal(read_state(store, 2)[0]["model"]["w"], values)
    part = read_rows(store, 2, lambda length: (5, 2))[0]["model"]["w"]
    assert torch.equal(part["values"], values[5:])
    save(2, 1)  # the same step again: the other ranks' objects are gone
    assert len(store._list()[2]) == 3
    name = next(name for name in store.manifest(2)["files"] if name.startswith("shard"))
    store._storage.write(store.path(2) / name, b"rotten")  # type: ignore[attr-defined]
    found = store.newest(lambda step: read_state(store, step), lambda *_: None)
    assert found is not None and found[0] == 1 and store.quarantined() == ["corrupt-step-000000002-1"]
    assert store.prune(Retention(1)) == []


def test_nodes_find_that_they_share_an_object_store(store_address: str) -> None:
    where = address(f"{store_address}/run")
    name = ".tmp-shared-1"

    def world(node: int, answers: list[Any]) -> Any:
        return SimpleNamespace(
            position=SimpleNamespace(nodes=2, local_rank=0, node_rank=node), is_first=node == 0, rank=node,
            broadcast_json=lambda told: told if node == 0 else [name, ""],
            gather_json=lambda told: [told, *answers],
        )  # fmt: skip

    check_shared(world(0, []), where)
    with pytest.raises(ConfigError, match="node 1 cannot write to the run directory"):
        check_shared(world(1, []), where)
    remote_at(where).write(where / name, b"shared")
    check_shared(world(1, []), where)
    remote_at(where).delete(where, [name])
    assert remote_at(where).list(where) == {} and remote_at(where).read(where / name) is None


@pytest.mark.core
def test_a_life_on_an_object_store(store_address: str) -> None:
    store = CheckpointStore(address(f"{store_address}/checkpoints"))
    assert store.steps() == [] and newest_valid(store, no_corruption) is None
    for step in (1, 2, 3, 4):
        size = store.save(step, STATE, {"eval": {"accuracy": step / 10}})
        assert size == store.sizes()[step]
    assert store.steps() == [4, 3, 2, 1]
    found = newest_valid(store, no_corruption)
    assert found is not None and found[:2] == (4, STATE)
    assert store.prune(Retention(3)) == [1]
    damage(store, 4)
    rows = list_checkpoints(store, verify=True)
    assert [(row.step, row.verified) for row in rows] == [(4, False), (3, True), (2, True)]
    told: list[int] = []
    found = newest_valid(store, lambda step, problem: told.append(step))
    assert found is not None and found[:2] == (3, STATE) and told == [4]
    assert store.steps() == [3, 2] and store.quarantined() == ["corrupt-step-000000004-1"]
    store.save(3, b"again", {})
    assert store.read(3)[0] == b"again" and len(store._list()[3]) == 2, "the old state is gone"
    assert str(checkpoints_of(store_address).directory) == str(store.directory)
    assert locate(f"{store_address}@2")[1] == 2 and locate(str(store.path(3)))[1] == 3
    aside = store.move_aside()
    assert aside is not None and CheckpointStore(aside).steps() == [3, 2] and store.steps() == []


def test_a_save_without_its_manifest_counts_for_nothing(store_address: str) -> None:
    store = CheckpointStore(address(store_address))
    store.save(1, b"one", {})
    store._storage.write(store.path(2) / "state-0.pt", b"two")  # type: ignore[attr-defined]
    assert store.steps() == [1] and newest_valid(store, no_corruption) is not None
    assert [row.step for row in list_checkpoints(store, verify=True)] == [1]
    store.save(2, b"another", {})
    assert store.read(2)[0] == b"another"


@pytest.mark.core
def test_of_two_writers_one_is_refused(store_address: str) -> None:
    one, other = CheckpointStore(address(store_address)), CheckpointStore(address(store_address))
    one.open_for_writing()
    other.open_for_writing()
    one.save(1, b"one", {})
    with pytest.raises(CheckpointError, match="another writer") as caught:
        other.save(1, b"other", {})
    assert "\n" not in str(caught.value) and one.read(1)[0] == b"one"
    one.save(1, b"one again", {})
    later = CheckpointStore(address(store_address))
    later.save(1, b"later", {})  # it was there when this writer began: its own line of training
    assert one.read(1)[0] == b"later"


QUICK = [(server, rule) for server in SERVERS for rule in ("500", "cut answer")]
# One server each: what is tried is the client, whichever server answers.
LONG = [
    *(("moto", rule) for rule in ("reset", "truncate")),
    *(("s3rver", rule) for rule in ("503", "lose answer", "stall")),
]


@pytest.mark.parametrize(
    ("server", "rule"),
    [*QUICK, *LONG],
    indirect=["server"],
    scope="module",
)
def test_a_network_that_damages(server: ObjectServer, store_address: str, rule: str) -> None:
    """Each request of a save is hit once: what is acknowledged is there, what is there is whole."""
    store = CheckpointStore(address(store_address))
    store.open_for_writing()
    store.save(0, STATE, {})
    before = server.requests()
    store.save(1, STATE, {})
    count = server.requests() - before
    assert count >= 5
    acknowledged = refused = 0
    told: list[int] = []
    for nth in range(count if rule != "stall" else 2):
        step = 10 + nth
        server.damage(rule, at=[nth])
        try:
            store.save(step, STATE, {})
            acknowledged = step
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
        server.calm()
        fresh = CheckpointStore(address(store_address))
        found = newest_valid(fresh, lambda bad, problem: told.append(bad))
        assert found is not None and found[0] >= acknowledged and found[1] == STATE, f"request {nth}"
    assert not told or rule == "truncate", "what was never acknowledged may be damaged by a lying network"
    assert acknowledged and (rule == "truncate" or not refused), "one failure is asked again"


def test_a_run_there_belongs_to_one_launch(store_address: str) -> None:
    run = address(store_address)
    mine = acquire(run)
    assert mine.problem is None and mine.token is not None and mine.token.number == 1
    store = CheckpointStore(run / "checkpoints", fence(run, mine.token))
    store.save(1, STATE, {})
    notes = lease_records_at(run / "owner")
    theirs = replace(LeaseRecord.for_this_process(""), word="theirs", host="far", boot="another", machine="")
    assert not notes.create(1, theirs.render()), "a number is given once"
    assert notes.create(2, theirs.render()) and notes.numbers() == [1, 2]
    with pytest.raises(RunTakenError, match="on far"):
        store.save(2, STATE, {})
    assert not mine.confirm_ownership() and store.steps() == [1]
    mine.close()
    notes.rewrite(2, replace(theirs, is_over=True).render())
    again = acquire(run)
    assert again.token is not None and again.token.number == 3 and notes.numbers() == [3]
    again.close()
