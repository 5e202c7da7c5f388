"""Counters of the agent: time by state, steps done again, signals, log messages."""

import logging
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.signals import StopFlag
from tandem.telemetry import agent_state, metrics
from tandem.telemetry.journal import Restarts
from tandem.telemetry.meter import ACTIVITIES
from tandem.telemetry.registry import Registry


@given(
    st.lists(
        st.tuples(st.sampled_from(list(agent_state.ACTIVITY_OF)), st.floats(0, 10), st.booleans()),
        max_size=40,
    )
)
def test_activities_add_up_to_wall_time(switches: list[tuple[str, float, bool]]) -> None:
    now = start = 1000.0
    activities, spent = agent_state.Activities(start), dict.fromkeys(ACTIVITIES, 0.0)

    def take() -> None:
        rows: Any = activities.take(now)
        for _, labels, value in rows:
            spent[labels["activity"]] += value

    for state, seconds, takes in switches:
        now += seconds
        activities.enter(state, now)
        if takes:
            take()
    take()
    assert sum(spent.values()) == pytest.approx(now - start)
    assert activities.take(now) == []


def test_time_belongs_to_the_state_that_the_run_is_in() -> None:
    activities = agent_state.Activities(-3.0)
    for state, now in (("rendezvous", 2.0), ("training", 4.0), ("checkpointing", 9.0), ("training", 10.0)):
        activities.enter(state, now)
    activities.enter("succeeded", 14.0)
    rows: Any = activities.take(15.0)
    spent = {labels["activity"]: value for _, labels, value in rows}
    assert spent == {"startup": 5.0, "rendezvous": 2.0, "train": 9.0, "checkpoint": 1.0, "drain": 1.0}


def test_a_clock_that_steps_back_counts_nothing() -> None:
    activities = agent_state.Activities(10.0)
    activities.enter("training", 5.0)
    rows: Any = activities.take(11.0)
    assert [value for _, _, value in rows] == [1.0]


def test_the_age_of_a_process_grows() -> None:
    first = agent_state.process_age_seconds()
    assert 0 < first < 24 * 3600
    time.sleep(0.05)
    assert agent_state.process_age_seconds() > first


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 9)), max_size=30))
def test_steps_done_again_and_new_ones_are_all_steps(moves: list[tuple[bool, int, int]]) -> None:
    replays, done, reached, steps, again = agent_state.Replays(), 0, 0, 0, 0
    replays.begin(0)
    for restarts, amount, unreported in moves:
        if restarts:  # killed `unreported` steps after the last report, of which a snapshot knows
            done = max(done - amount, 0) if amount % 2 else done + unreported
            missed, redone = replays.begin(done)
            steps, again = steps + missed, again + redone
        else:
            again += replays.advance(done + amount)
            done, steps = done + amount, steps + amount
        reached = max(reached, done)
    assert steps - again == reached


def test_an_agent_started_anew_knows_how_far_the_run_had_come() -> None:
    replays = agent_state.Replays(reached=120)
    replays.begin(100)
    assert [replays.advance(step) for step in (110, 110, 130, 140)] == [10, 0, 10, 0]


WORLD, HANG, STOPPED, FINISHED = ({"kind": kind} for kind in ("world", "hang", "stopped", "finished"))


@pytest.mark.parametrize(
    "events, counted",
    [
        ([WORLD], {}),
        ([WORLD, WORLD, HANG, WORLD, WORLD], {"crash": 2, "hang": 1}),
        ([WORLD, STOPPED, WORLD, WORLD], {"preemption": 1, "crash": 1}),
        ([WORLD, {"kind": "failed"}, WORLD], {"crash": 1}),  # another pod
        ([{**WORLD, "nodes": 3}, {**WORLD, "nodes": 2}, {**WORLD, "nodes": 2}], {"elastic": 1, "crash": 1}),
        ([WORLD, WORLD, HANG, WORLD, FINISHED], {"crash": 1, "hang": 1}),
        ([WORLD, HANG, WORLD, FINISHED, WORLD, WORLD], {"crash": 1}),  # extended
        ([WORLD, WORLD, {**WORLD, "anew": True}, WORLD], {"crash": 1}),  # --resume never
        ([HANG, {"no": "kind"}, STOPPED], {}),
    ],
)
def test_restarts_are_counted_over_launches(events: list[dict[str, Any]], counted: dict[str, int]) -> None:
    assert Restarts(events).by_reason == counted
    restarts = Restarts(events[:2])
    for event in events[2:]:
        restarts.count(event["kind"], event)
    stops = counted.get("preemption", 0)
    assert (restarts.total, restarts.planned_stops) == (sum(counted.values()) - stops, stops)
    registry = Registry()
    registry.apply(Restarts(events).earlier(starts_over=False))
    page = registry.page().decode()
    assert f"tandem_planned_stops_total {float(stops)}" in page and 'reason="preemption"} 0.0' in page


def test_signals_are_counted_once() -> None:
    stop, counted = StopFlag(), dict[str, int]()
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT):
        stop._handle(number, None)
    assert stop.received == {"SIGTERM": 1}  # the rest are repeats within two seconds
    assert agent_state.signal_increments(stop.received, counted) == [
        metrics.SIGNALS_RECEIVED.inc(signal="SIGTERM")
    ]
    assert agent_state.signal_increments(stop.received, counted) == []


def test_log_messages_are_counted_by_level() -> None:
    registry = Registry()
    agent_state.count_log_messages(lambda message: registry.apply(message.samples))  # type: ignore[union-attr]
    agent_state.count_log_messages(lambda message: registry.apply(message.samples))  # type: ignore[union-attr] # replaces it
    logger = logging.getLogger("tandem.test")
    try:
        logger.info("not counted")
        for level in (logging.WARNING, logging.ERROR, logging.ERROR, logging.CRITICAL):
            logger.log(level, "counted")
    finally:
        parent = logging.getLogger("tandem")
        parent.handlers = [
            each for each in parent.handlers if not isinstance(each, agent_state.CountingHandler)
        ]
    counted = [
        registry.registry.get_sample_value("tandem_log_messages_total", {"level": level})
        for level in ("warning", "error", "critical")
    ]
    assert counted == [1, 2, 1]


def test_the_memory_of_a_process() -> None:
    assert agent_state.resident_bytes(os.getpid()) > 2**20
    assert agent_state.resident_bytes(2**22 + 5) == 0


def test_a_volume_that_does_not_answer_has_no_size(tmp_path: Path) -> None:
    assert len(agent_state.volume_sizes(tmp_path)) == 2
    assert agent_state.volume_sizes(tmp_path / "gone") == []
