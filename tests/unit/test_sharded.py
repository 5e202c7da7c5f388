"""The files of a sharded checkpoint: any number of readers of any number of writers, and what is damaged."""

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.checkpoint import sharded
from tandem.checkpoint.manifest import is_sharded, seal
from tandem.checkpoint.sharded import (
    SHARD,
    VALUES,
    divided,
    file_name,
    read_rows,
    read_state,
    shard,
    write_parts,
)
from tandem.checkpoint.state import serialize
from tandem.checkpoint.storage.protocol import STATE, Sink
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, CorruptCheckpointError, UnloadableError
from trials.system_calls import can_trace, trace

FLIPS = int(os.environ.get("TEST_FLIPS", "200"))
"""Bits that are flipped in each file."""


def whole_state(step: int = 1) -> dict[str, Any]:
    """Tensors that are sharded (w, and what is below it), and others."""
    chance = torch.Generator().manual_seed(step)
    return {
        "model": {
            "w": torch.randn(7, 3, generator=chance),
            "half": torch.randn(2, 4, generator=chance).bfloat16(),
            "none": torch.zeros(0, 3),
            "mean": torch.full((3,), 2.0),
        },
        "optimizer": {"state": {0: {"m": torch.randn(7, 3, generator=chance), "step": torch.tensor(1.0)}}},
        "step": step,
    }


SHARDED = {("model", "w"), ("model", "half"), ("model", "none"), ("optimizer", "state", 0, "m")}


def rows_of(rank: int, ranks: int) -> Any:
    def rows(length: int) -> tuple[int, int]:
        most = -(-length // ranks)
        first = min(rank * most, length)
        return first, min(most, length - first)

    return rows


def of_rank(value: Any, rows: Any, path: tuple[Any, ...] = ()) -> Any:
    if path in SHARDED:
        first, count = rows(len(value))
        return shard(value.shape, first, value[first : first + count])
    if isinstance(value, dict):
        return {key: of_rank(item, rows, (*path, key)) for key, item in value.items()}
    return value


def save(store: CheckpointStore, ranks: int, step: int = 1) -> None:
    pending = store.begin(step)
    files = {}
    for rank in reversed(range(ranks)):
        rest, parts = divided(of_rank(whole_state(step), rows_of(rank, ranks)))
        index = dict[str, Any]()
        name, entry = store.add(
            store.pending(pending.name), file_name(rank, ranks),
            lambda sink, parts=parts, index=index: index.update(write_parts(parts, sink)),
        )  # fmt: skip
        files[name] = {**entry, **index}
    name, entry = store.add(pending, STATE, serialize(rest))
    store.publish(step, pending, {**files, name: entry}, {"eval": {"loss": 0.5}})


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())
    return bool(one == other)


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.mark.parametrize("writers", [1, 2, 3, 4, 9])
def test_any_number_of_ranks_reads_its_rows(store: CheckpointStore, writers: int) -> None:
    save(store, writers)
    store.verify(1)
    assert is_sharded(store.manifest(1)) and store.scores(1) == {"loss": 0.5}
    state, info = read_state(store, 1)
    assert equal(state, whole_state()) and info["eval"] == {"loss": 0.5}
    for readers in (1, 2, 3, 4, 8):
        for rank in range(readers):
            rows = rows_of(rank, readers)
            assert equal(read_rows(store, 1, rows)[0], of_rank(whole_state(), rows)), (readers, rank)


def test_a_tensor_of_the_model_is_read_in_place(store: CheckpointStore) -> None:
    save(store, 2)
    destination = torch.zeros(7, 3)
    state, _ = read_state(store, 1, {"w": destination, "half": torch.zeros(2, 4)})
    assert state["model"]["w"] is destination and torch.equal(destination, whole_state()["model"]["w"])
    assert equal(state, whole_state())


def test_a_damaged_checkpoint_changes_nothing_in_the_model(store: CheckpointStore) -> None:
    """A run without an older checkpoint goes on with the initial values that are there."""
    save(store, 3)
    last = store.path(1) / file_name(2, 3)
    raw = bytearray(last.read_bytes())
    raw[0] ^= 1
    last.write_bytes(raw)
    destinations = {"w": torch.zeros(7, 3), "half": torch.zeros(2, 4, dtype=torch.bfloat16)}
    with pytest.raises(CorruptCheckpointError):
        read_state(store, 1, destinations)
    assert not any(destination.any() for destination in destinations.values())


def test_a_range_larger_than_a_piece_is_read_in_pieces(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 2)
    monkeypatch.setattr(sharded, "PIECE_BYTES", 10)  # less than a row
    assert equal(read_state(store, 1)[0], whole_state())
    for rank in range(3):
        assert equal(read_rows(store, 1, rows_of(rank, 3))[0], of_rank(whole_state(), rows_of(rank, 3)))


def test_a_rank_reads_only_the_files_with_its_rows(store: CheckpointStore) -> None:
    save(store, 7)
    last = store.path(1) / file_name(6, 7)
    raw = bytearray(last.read_bytes())
    raw[0] ^= 1  # the row of the last rank
    last.write_bytes(raw)
    assert equal(read_rows(store, 1, rows_of(0, 2))[0], of_rank(whole_state(), rows_of(0, 2)))
    with pytest.raises(CorruptCheckpointError):
        read_rows(store, 1, rows_of(1, 2))


def test_two_names_of_one_memory_are_written_once(store: CheckpointStore) -> None:
    values = torch.randn(64, 64)
    rest, parts = divided({"model": {"a": shard((64, 64), 0, values), "b": shard((64, 64), 0, values)}})
    pending = store.begin(1)
    index = dict[str, Any]()
    name, entry = store.add(pending, file_name(0, 1), lambda sink: index.update(write_parts(parts, sink)))
    state, of_state = store.add(pending, STATE, serialize({**rest, "step": 1}))
    store.publish(1, pending, {name: {**entry, **index}, state: of_state}, {})
    assert int(str(entry["bytes"])) < 2 * values.nbytes
    found = read_state(store, 1)[0]["model"]
    assert torch.equal(found["a"], values) and torch.equal(found["b"], values)


def test_every_flipped_bit_is_found(store: CheckpointStore) -> None:
    save(store, 3)
    chance = random.Random(1)
    flips = 0
    for path in sorted(store.path(1).iterdir()):
        raw = path.read_bytes()
        bits = range(8 * len(raw))
        for bit in chance.sample(bits, min(FLIPS, len(bits))):
            broken = bytearray(raw)
            broken[bit // 8] ^= 1 << bit % 8
            path.write_bytes(broken)
            with pytest.raises(CorruptCheckpointError):
                store.verify(1)
            flips += 1
        path.write_bytes(raw[:-1])
        with pytest.raises(CorruptCheckpointError):
            read_state(store, 1)
        path.unlink()
        with pytest.raises(CorruptCheckpointError):
            store.verify(1)
        path.write_bytes(raw)
    print(f"{flips} flipped bits, all found")
    store.verify(1)


def test_a_damaged_rank_file_falls_back_and_is_set_aside(store: CheckpointStore) -> None:
    for step in (1, 2):
        save(store, 2, step)
    path = store.path(2) / file_name(1, 2)
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    found = store.newest(lambda step: read_state(store, step), lambda *_: None)
    assert found is not None and found[0] == 1 and equal(found[1][0], whole_state(1))
    assert store.quarantined() == ["corrupt-step-000000002-1"]


def changed(store: CheckpointStore, what: Any) -> CheckpointStore:
    """The same checkpoint with another manifest, sealed as tandem does."""
    path = store.path(1) / "manifest.json"
    body = json.loads(path.read_text())
    del body["manifest_sha256"]
    what(body)
    path.write_bytes(seal(body))
    return store


def hostile_manifests() -> Iterator[Any]:
    first, second = file_name(0, 2), file_name(1, 2)
    yield lambda body: body["files"].pop(second)
    yield lambda body: body["files"].update({"../x.bin": body["files"].pop(second)})
    yield lambda body: body["files"][first].pop("index")
    yield lambda body: body["files"][first]["index"].update(offset=10**9)
    yield lambda body: body["files"][first]["index"].update(sha256="0")
    yield lambda body: body["files"].pop("state.pt")
    yield lambda body: body.update(format=1)


@pytest.mark.parametrize("what", [*hostile_manifests()])
def test_a_manifest_that_tandem_has_not_written_is_refused(store: CheckpointStore, what: Any) -> None:
    save(store, 2)
    with pytest.raises(CorruptCheckpointError):
        changed(store, what).manifest(1)


def test_the_format_of_a_newer_version_is_no_damage(store: CheckpointStore) -> None:
    save(store, 2)
    with pytest.raises(CheckpointError, match="format 3") as caught:
        changed(store, lambda body: body.update(format=3)).manifest(1)
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize(
    "change",
    [
        {"offsets": [1, 0]}, {"lengths": [100, 3]}, {"dtype": "float64"}, {"dtype": "save"},
        {"shape": [8, 3]}, {"bytes": 4}, {"file_offset": 10**9}, {"offsets": "x"},
        {"name": "model/other"}, {"shape": []},
    ],
)  # fmt: skip
def test_an_index_that_does_not_fit_is_not_loaded(store: CheckpointStore, change: dict[str, Any]) -> None:
    rest, parts = divided(of_rank(whole_state(), rows_of(0, 1)))
    pending = store.begin(1)

    def write(sink: Any) -> None:
        whole = bytearray()
        index.update(write_parts(parts, Sink(lambda data: (whole.extend(data), len(data))[1])))
        begin = index["index"]["offset"]
        entries = json.loads(whole[begin:])
        entries[0].update(change)
        text = json.dumps(entries).encode()
        sink.write(bytes(whole[:begin]) + text)
        index["index"]["sha256"] = hashlib.sha256(text).hexdigest()

    index = dict[str, Any]()
    name, entry = store.add(pending, file_name(0, 1), write)
    state, of_state = store.add(pending, STATE, serialize(rest))
    store.publish(1, pending, {name: {**entry, **index}, state: of_state}, {})
    with pytest.raises(UnloadableError):
        read_state(store, 1)


@pytest.mark.parametrize(
    "about", [[[10**12, 8], "float32"], [[-1], "float32"], [[], "float32"], [[2], "x"], 3]
)
def test_a_shard_of_an_impossible_size_is_not_loaded(store: CheckpointStore, about: Any) -> None:
    rest, parts = divided(of_rank(whole_state(), rows_of(0, 1)))
    rest["model"]["w"] = {SHARD: about}
    pending = store.begin(1)
    index = dict[str, Any]()
    name, entry = store.add(pending, file_name(0, 1), lambda sink: index.update(write_parts(parts, sink)))
    state, of_state = store.add(pending, STATE, serialize(rest))
    store.publish(1, pending, {name: {**entry, **index}, state: of_state}, {})
    with pytest.raises(UnloadableError):
        read_state(store, 1)


def test_a_file_that_another_node_wrote_elsewhere_fails_the_save(store: CheckpointStore) -> None:
    pending = store.begin(1)
    name, entry = store.add(pending, STATE, serialize({"step": 1}))
    there = {"bytes": 3, "sha256": "0" * 64, "index": {"offset": 1, "sha256": "0" * 64}}
    with pytest.raises(CheckpointError):
        store.publish(1, pending, {name: entry, file_name(0, 1): there}, {})
    assert store.steps() == []
    store.abandon(pending)
    save(store, 2)
    assert [path.name for path in store.directory.iterdir()] == ["step-000000001"]


@pytest.mark.faults
@pytest.mark.slow
def test_a_kill_at_every_file_call_loses_and_mixes_nothing(store: CheckpointStore, require: Any) -> None:
    require("ptrace", can_trace(), "this machine does not let a process trace its child")
    save(store, 2, 1)
    root = store.directory

    def again() -> None:
        save(CheckpointStore(root), 2, 2)

    calls = len(trace(again, root).calls)
    assert calls > 20
    for index in range(calls):
        for moment in ("before", "within"):
            CheckpointStore(root)._storage.remove([store.path(2)])
            trace(again, root, kill_at=(index, moment))  # type: ignore[arg-type]
            now = CheckpointStore(root)
            for step in now.steps():
                assert equal(read_state(now, step)[0], whole_state(step))
            assert now.steps() in ([1], [2, 1]) and now.without_manifest() == []
    save(CheckpointStore(root), 2, 3)
    assert not [path for path in root.iterdir() if path.name.startswith(".")]


def test_values_are_those_of_the_shard() -> None:
    rest, parts = divided({"model": {"w": shard((4, 2), 2, torch.ones(2, 2))}})
    assert rest == {"model": {"w": {SHARD: [[4, 2], "float32"]}}}
    assert list(parts) == ["model/w"] and parts["model/w"][VALUES].shape == (2, 2)
