"""Phases add up to the step, activities to wall time, throughput leaves the first steps out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry.meter import ACTIVITIES, PHASES, Activities, Meter, StepTimes

SECONDS = st.floats(0, 10)


def times(total: float) -> StepTimes:
    return StepTimes(0.0, 0.0, total, 0.0, 0.0, 0.0, 0.0)


@given(st.lists(st.tuples(*[SECONDS] * 7), max_size=30))
def test_phases_add_up_to_the_steps(steps: list[tuple[float, ...]]) -> None:
    meter = Meter()
    for parts in steps:
        meter.step(4, StepTimes(*parts))
    interval = meter.interval()
    assert sum(interval.phases.values()) == pytest.approx(interval.seconds)
    assert interval.seconds == pytest.approx(meter.seconds)
    assert tuple(interval.phases) == PHASES
    assert (interval.steps, interval.samples) == (len(steps), 4 * len(steps))


def test_the_wait_is_part_of_backward_and_of_nobodys_own_time() -> None:
    step = StepTimes(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, wait=7.0)
    assert step.phases() == dict(zip(PHASES, (1.0, 2.0, 3.0, 11.0, 5.0, 6.0), strict=True))
    assert (step.own, step.total) == (21.0, 28.0)


def test_an_interval_begins_anew() -> None:
    meter = Meter()
    meter.step(10, times(4.0))
    first = meter.interval()
    assert (first.samples_per_second, first.seconds_per_step) == (2.5, 4.0)
    empty = meter.interval()
    assert empty.steps == 0 and sum(empty.phases.values()) == 0.0
    assert empty.samples_per_second == empty.seconds_per_step == 0.0


def test_phases_of_all_steps_go_on_over_intervals() -> None:
    meter = Meter()
    for seconds in (1.0, 2.0, 4.0):
        meter.step(10, times(seconds))
        if seconds < 4:
            meter.interval()
    assert meter.phases["forward"] == sum(meter.phases.values()) == meter.seconds == 7.0


def test_throughput_leaves_out_the_first_twenty_steps() -> None:
    meter = Meter()
    assert meter.samples_per_second == 0.0
    for _ in range(20):
        meter.step(100, times(10.0))
    assert meter.samples_per_second == 10.0
    for _ in range(5):
        meter.step(100, times(1.0))
    assert meter.samples_per_second == 100.0
    assert (meter.steps, meter.samples, meter.seconds) == (25, 2500, 205.0)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="startup, rendezvous"):
        Activities(0.0).switch("lunch", 1.0)


@given(st.lists(st.tuples(st.sampled_from(ACTIVITIES), SECONDS, st.booleans()), max_size=40))
def test_activities_add_up_to_wall_time(switches: list[tuple[str, float, bool]]) -> None:
    now = start = 1000.0
    activities = Activities(start)
    taken = dict.fromkeys(ACTIVITIES, 0.0)
    for name, seconds, take in switches:
        now += seconds
        before = activities.current
        assert activities.switch(name, now) == before
        if take:
            taken = {
                key: value + part.get(key, 0.0)
                for part in [activities.take(now)]
                for key, value in taken.items()
            }
    totals = activities.totals(now)
    assert sum(totals.values()) == pytest.approx(now - start)
    last = activities.take(now)
    assert {key: value + last.get(key, 0.0) for key, value in taken.items()} == pytest.approx(totals)
    assert activities.take(now) == {}


def test_activities_in_order() -> None:
    activities = Activities(0.0)
    activities.switch("train", 3.0)
    previous = activities.switch("checkpoint", 10.0)
    activities.switch(previous, 12.0)
    totals = activities.totals(15.0)
    assert (totals["startup"], totals["train"], totals["checkpoint"]) == (3.0, 10.0, 2.0)


def test_a_clock_that_steps_back_counts_nothing() -> None:
    activities = Activities(10.0)
    activities.switch("train", 5.0)
    assert sum(activities.totals(11.0).values()) == 1.0


def test_a_refused_switch_changes_nothing() -> None:
    activities = Activities(0.0)
    with pytest.raises(ValueError):
        activities.switch("lunch", 1.0)
    assert activities.current == "startup"
