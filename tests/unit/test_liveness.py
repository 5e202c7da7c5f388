"""The rendezvous state by a node's own clock: torch's own holder of it, two clocks, one store."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as engine

from tandem.checkpoint.listing import is_finished
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import FAILED
from tandem.launch import rendezvous
from tandem.launch.generation_sync import check_all_are_in
from tandem.launch.rendezvous import JobEndedError, StoreLostError
from tandem.launch.rendezvous_state import LastCall, WatchfulBackend
from tandem.platforms.detection import Placement

NODES = [engine._NodeDesc(f"node{index}", 1, index) for index in (0, 1)]


def shifted(seconds: float) -> type[datetime]:
    """datetime of a machine whose clock is off by `seconds`."""

    class Shifted(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + timedelta(seconds=seconds)

    return Shifted


def holders(store: TCPStore) -> list[Any]:
    settings = engine.RendezvousSettings("tandem", 2, 2, engine.RendezvousTimeout(), timedelta(seconds=1), 5)
    backends = [WatchfulBackend(store, LastCall(60, 1), lambda: None) for _ in NODES]
    return [engine._BackendRendezvousStateHolder(backend, settings, 0) for backend in backends]


@pytest.mark.parametrize("seconds", [-3600, -30, -6, 0, 6, 30, 3600])
def test_a_node_whose_clock_is_off_lives(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.launch import rendezvous_state

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    true, off = holders(store)

    def as_node(index: int, holder: Any, beats: bool) -> None:
        clock = shifted(seconds if index else 0)
        monkeypatch.setattr(engine, "datetime", clock)
        monkeypatch.setattr(rendezvous_state, "datetime", clock)
        holder.sync()
        if beats:
            holder.state.participants.setdefault(NODES[index], 0)
            holder.state.last_heartbeats[NODES[index]] = clock.now(UTC)
            holder.mark_dirty()
            assert holder.sync()

    for _ in range(3):
        as_node(0, true, beats=True)
        as_node(1, off, beats=True)
        for index, holder in enumerate((true, off)):
            as_node(index, holder, beats=False)
            assert set(holder.state.participants) == set(NODES)


def test_a_node_that_says_nothing_more_is_out_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from tandem.launch import rendezvous_state

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    true, off = holders(store)
    now = [100.0]
    monkeypatch.setattr(rendezvous_state.running_clock, "now", lambda: now[0])
    for index, holder in enumerate((true, off)):
        holder.sync()
        holder.state.participants[NODES[index]] = 0
        holder.state.last_heartbeats[NODES[index]] = datetime.now(UTC) + timedelta(hours=index)
        holder.mark_dirty()
        assert holder.sync()
    for seconds, alive in ((4.0, 2), (4.0, 2), (2.0, 1)):  # first read after four seconds
        now[0] += seconds
        true.state.last_heartbeats[NODES[0]] = datetime.now(UTC)  # the one that looks says that it lives
        true.mark_dirty()
        true.sync()
        true.sync()
        assert len(true.state.participants) == alive


@pytest.mark.parametrize(
    "text, code",
    [
        ("0", 0),
        ("143", 143),
        ("abc", FAILED),
        ("-1", FAILED),
        ("999", FAILED),
        ("", FAILED),
        ("9" * 5000, FAILED),
    ],
)
def test_what_comes_as_a_verdict_is_an_exit_code_or_a_failure(text: str, code: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    rendezvous.raise_if_job_ended(store)
    store.set(rendezvous.JOB_RESULT_KEY, text)
    with pytest.raises(JobEndedError) as caught:
        rendezvous.raise_if_job_ended(store)
    assert caught.value.code == code
    assert (text[:40] in str(caught.value)) or code == int(text)


def test_a_verdict_of_0_needs_a_job_that_is_done() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(rendezvous.JOB_RESULT_KEY, "0")
    with pytest.raises(JobEndedError):
        rendezvous.check_job_result(store, lambda: True)
    assert rendezvous.is_confirmed(store)
    rendezvous.check_job_result(store, lambda: False)
    assert not store.check([rendezvous.JOB_RESULT_KEY]) and not rendezvous.is_confirmed(store)
    store.set(rendezvous.JOB_RESULT_KEY, "1 rank 3 failed")
    with pytest.raises(JobEndedError, match="code 1: rank 3 failed") as caught:
        rendezvous.check_job_result(store, lambda: False)
    assert caught.value.code == FAILED


def test_a_run_is_finished_when_its_last_step_is_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    assert not is_finished(store)
    for step, finished in ((50, False), (99, False), (100, True)):
        store.save(step, b"x", {"steps_planned": 100})
        assert is_finished(store) == finished
    state = store.path(100) / "state.pt"
    state.write_bytes(b"y")
    assert not is_finished(store)
    state.unlink()
    assert not is_finished(store)
    store.save(101, b"x", {"steps_planned": "many"})
    assert not is_finished(store)


def test_a_world_smaller_than_asked_for_never_opens() -> None:
    asked = Placement("by-hand", 2, 0, None, "127.0.0.1", 1)
    check_all_are_in(asked, 2, 0)
    with pytest.raises(StoreLostError, match="1 of 2 nodes"):
        check_all_are_in(asked, 1, 0)
