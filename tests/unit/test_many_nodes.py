"""A thousand nodes' words on node 0: what does not grow with them, and what is bounded."""

import json
from collections import Counter
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import running_clock
from tandem.launch.rendezvous import read_all
from tandem.launch.watchdog import NODES_AT_ONCE, Watchdog
from tandem.telemetry import metrics
from tandem.telemetry.hangs import Beat
from tandem.telemetry.messages import checked, pack_samples
from tandem.telemetry.metrics import Sample
from tandem.telemetry.registry import Registry
from tandem.timeouts import STALE_SECONDS, WATCHDOG_TICK_SECONDS


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Counting:
    """A store whose questions are counted."""

    def __init__(self, store: TCPStore) -> None:
        self._store, self.asked = store, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._store, name)


def test_all_that_spoke_before_are_read_in_one_round_trip(store: TCPStore) -> None:
    counting, there = Counting(store), set[str]()
    keys = [f"pulse/{node}" for node in range(100)]
    assert read_all(counting, keys, there) == {}  # type: ignore[arg-type]
    for key in keys[1:]:
        store.set(key, key)
    assert read_all(counting, keys, there) == {key: key.encode() for key in keys[1:]}  # type: ignore[arg-type]
    store.set(keys[0], "late")
    read_all(counting, keys, there)  # type: ignore[arg-type]
    counting.asked.clear()
    assert read_all(counting, keys, there)[keys[0]] == b"late"  # type: ignore[arg-type]
    assert counting.asked == {"multi_get": 1}


def test_metrics_of_a_node_are_taken_in_when_they_change_or_were_dropped(
    store: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, gauge = Registry(), metrics.GPU_TEMPERATURE_CELSIUS
    watchdog = Watchdog(0, "here", store.port, lambda: store, registry)
    taken: list[list[Sample]] = []
    apply = registry.apply_node
    monkeypatch.setattr(registry, "apply_node", lambda node, said: (taken.append(said), apply(node, said)))

    def read(celsius: float, again: bool = False) -> float | None:
        if not again:
            store.set("metrics/1", pack_samples([gauge.set(celsius, gpu=0)]))
        watchdog._read_samples(store, [1])
        return registry.registry.get_sample_value(gauge.name, {"gpu": "0", "node": "1"})

    assert [read(50.0), read(50.0), read(60.0)] == [50.0, 50.0, 60.0]
    assert len(taken) == 2  # what says the same once more is not taken in again
    now = running_clock.now()
    monkeypatch.setattr(running_clock, "now", lambda: now + STALE_SECONDS + 1)
    assert read(60.0, again=True) is None  # nothing new for long: the node is gone
    assert read(60.0) == 60.0


def test_all_nodes_have_their_turn_before_one_is_stale() -> None:
    assert 1024 / NODES_AT_ONCE * WATCHDOG_TICK_SECONDS < STALE_SECONDS


@pytest.mark.parametrize(
    "wrong", [{"rank": True}, {"rank": 1.0}, {"phase": 3}, {"own": "x"}, {"trained": 1}, {"step": None}]
)
def test_a_beat_is_checked_field_by_field(wrong: dict[str, Any]) -> None:
    right = dict(rank=1, step=2, activity="train", phase="data", quiet=1, limit=2.0, hang=3.0, trained=True,
                 idle=0, idle_limit=9.0,
                 waiting=False, own=None, quick=0.5, doing=None, node=0, node_name="n", silent=0.0,
                 halted=False)  # fmt: skip
    assert checked(Beat, json.loads(json.dumps(right))).rank == 1
    with pytest.raises(ValueError, match=f"strange {next(iter(wrong))}"):
        checked(Beat, {**right, **wrong})
