"""What nodes share while they meet is data: a pickle that somebody plants in the store is run by nobody."""

import base64
import dataclasses
import json
import os
import pickle
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as engine
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from tandem.launch.generation_sync import agreed
from tandem.launch.rendezvous import StoreLostError
from tandem.launch.rendezvous_state import (
    NO_STATE,
    STATE_KEY,
    LastCall,
    WatchfulBackend,
    describe_joined_nodes,
    from_text,
    poll_intervals,
    to_text,
)
from tandem.platforms.detection import Placement

NODES = [engine._NodeDesc(f"{index:06d}.node{index}", 7 + index, index) for index in range(3)]
NOW = datetime(2026, 11, 22, 20, 42, 1, 5, UTC)


class Planted:
    """A pickle that makes a file where it is read."""

    def __init__(self, file: Path) -> None:
        self._command = f"touch {file}"

    def __reduce__(self) -> Any:
        return os.system, (self._command,)


def whole() -> Any:
    state = engine._RendezvousState()
    state.round, state.complete, state.deadline = 3, True, NOW + timedelta(seconds=1)
    state.participants = {NODES[1]: 1, NODES[0]: 0}
    state.wait_list, state.redundancy_list = {NODES[2]}, set()
    state.last_heartbeats = {node: NOW + timedelta(milliseconds=index) for index, node in enumerate(NODES)}
    return state


@pytest.fixture
def store() -> TCPStore:
    timeout = timedelta(seconds=10)
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)


def holder(store: TCPStore) -> Any:
    settings = engine.RendezvousSettings("tandem", 2, 2, engine.RendezvousTimeout(), timedelta(seconds=1), 99)
    backend = WatchfulBackend(store, LastCall(60, 1), lambda: None)
    return engine._BackendRendezvousStateHolder(backend, settings, 0)


def joined(state_holder: Any, index: int) -> None:
    state_holder.sync()
    state_holder.state.participants[NODES[index]] = index
    state_holder.state.last_heartbeats[NODES[index]] = datetime.now(UTC)
    state_holder.mark_dirty()
    assert state_holder.sync(), "the state was written"


@pytest.mark.parametrize("state", [engine._RendezvousState(), whole()], ids=["empty", "whole"])
def test_a_state_travels_as_data_and_comes_back_the_same(state: Any) -> None:
    text = to_text(state)
    assert vars(from_text(text)) == vars(state)
    assert to_text(from_text(text)) == text and json.loads(text)["round"] == state.round


@pytest.mark.parametrize("is_joined", [False, True])
def test_a_planted_pickle_is_not_run_and_the_nodes_meet(
    store: TCPStore, tmp_path: Path, is_joined: bool
) -> None:
    first, second = holder(store), holder(store)
    if is_joined:
        joined(first, 0)
    bits = pickle.dumps(Planted(tmp_path / "was-here"))
    assert pickle.loads(bits) == 0, "it works"
    (tmp_path / "was-here").unlink()
    for planted in (bits, base64.b64encode(bits)):
        for key in (STATE_KEY, "torch.rendezvous.tandem"):
            store.set(key, planted)
        for each in (second, first):
            each.sync()
        joined(second, 1)
        first.sync()
        store.set(STATE_KEY, planted)
        joined(first, 0)
        for each in (first, second):
            each.sync()
            assert set(each.state.participants) == {NODES[0], NODES[1]}
    assert not (tmp_path / "was-here").exists()


@pytest.mark.parametrize("poison", [None, b"", NO_STATE, b"none ", b"{}", b"\0\xff"])
def test_a_state_that_is_gone_or_none_is_put_back(store: TCPStore, poison: bytes | None) -> None:
    first, second = holder(store), holder(store)
    joined(first, 0)
    joined(second, 1)
    if poison is None:
        store.delete_key(STATE_KEY)
    else:
        store.set(STATE_KEY, poison)
    second.sync()
    assert set(second.state.participants) == {NODES[0], NODES[1]}
    store.delete_key(STATE_KEY)
    joined(first, 0)  # writes without reading first
    second.sync()
    assert NODES[0] in second.state.participants


def test_a_state_that_is_poisoned_again_and_again_is_one_line(
    store: TCPStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = WatchfulBackend(store, LastCall(60, 1), lambda: None)
    monkeypatch.setattr(backend, "_replace", lambda expected, text: b"poison")
    with pytest.raises(RendezvousConnectionError, match="again and again"):
        backend.get_state()
    assert len(caplog.records) == 1 and "invalid rendezvous state" in caplog.text


GOOD = json.loads(to_text(whole()))
NODE = ["000000.node0", 7, 0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", None), ("round", "1"), ("round", -1), ("round", 2**31), ("round", 1.0), ("round", True),
        ("complete", 1), ("complete", None), ("closed", "no"),
        ("deadline", 5), ("deadline", "soon"), ("deadline", "2026-11-22T20:42:01"), ("deadline", []),
        ("participants", None), ("participants", 3), ("participants", {"a": 1}), ("participants", "abc"),
        ("participants", [NODE]), ("participants", [[*NODE, "0"]]), ("participants", [[*NODE, -1]]),
        ("participants", [[[], 7, 0, 0]]), ("participants", [["a", None, 0, 0]]),
        ("wait_list", [1]), ("wait_list", [["a", 1]]), ("wait_list", [["a", 1, {}]]), ("wait_list", {}.keys),
        ("redundancy_list", False), ("last_heartbeats", [[*NODE, 12]]), ("last_heartbeats", [[*NODE, None]]),
        ("last_heartbeats", [[*NODE, "2026-11-22"]]),
    ],
)  # fmt: skip
def test_a_field_that_is_none_is_no_state(name: str, value: Any) -> None:
    words = {**GOOD, name: value} if not callable(value) else {k: v for k, v in GOOD.items() if k != name}
    with pytest.raises(ValueError, match=r"."):
        from_text(json.dumps(words).encode())


@given(st.binary(max_size=200) | st.text(max_size=50).map(str.encode) | st.just(b"[" * 100_000))
def test_any_bytes_are_a_state_or_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        from_text(text)


@pytest.mark.parametrize("text", [b"", b"\xff\0", b"0", b"1.x", b"1." + b"a" * 33, b"-1." + b"a" * 32])
def test_what_the_first_node_has_not_written_is_a_store_that_is_lost(store: TCPStore, text: bytes) -> None:
    store.set("tandem/generation", text)
    with pytest.raises(StoreLostError, match="tandem/generation"):
        agreed(store, "tandem/generation", r"\d{1,9}\.[0-9a-f]{32}\.(nothing|saved)")


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (1, (0.05, 1, 0)),
        (16, (0.05, 1, 0)),
        (32, (0.2, 4, 0.64)),
        (64, (0.8, 5, 1.28)),
        (1024, (1.0, 5, 5)),
    ],
)
def test_many_nodes_look_less_often_and_stay_out_of_each_others_way(
    nodes: int, expected: tuple[float, int, float]
) -> None:
    assert poll_intervals(nodes) == expected


@pytest.mark.parametrize(
    ("nodes", "elastic", "said"),
    [
        (2, None, "2 of 2 nodes have joined"),
        (4, None, "2 of 4 nodes have joined, missing node 2, 3"),
        (12, None, "2 of 12 nodes have joined, missing node 2, 3, 4, 5, 6, 7, 8, 9, 2 more"),
        (4, (1, 4), "2 of 4 nodes have joined"),
    ],
)
def test_who_has_not_come_is_named(nodes: int, elastic: tuple[int, int] | None, said: str) -> None:
    handler = SimpleNamespace(_state_holder=SimpleNamespace(state=whole()))
    placement = Placement("by-hand", nodes, 0, 1, "node0", 29500, elastic)
    assert describe_joined_nodes(handler, placement) == said  # type: ignore[arg-type]
    if elastic is None and nodes > 2:  # one that has not joined again yet missed itself
        late = dataclasses.replace(placement, node_rank=2)
        joined = describe_joined_nodes(handler, late)  # type: ignore[arg-type]
        assert joined.startswith(f"3 of {nodes} nodes have joined, missing node 3")
    assert describe_joined_nodes(SimpleNamespace(), placement) == f"some of {nodes} nodes have joined"  # type: ignore[arg-type]
