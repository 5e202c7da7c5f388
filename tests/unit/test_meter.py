"""Phases add up to the step, throughput leaves the first steps out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.telemetry.meter import PHASES, Meter, StepTimes

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
    assert interval.seconds == pytest.approx(meter.total.seconds)
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
    assert first.samples_per_second == 2.5
    empty = meter.interval()
    assert empty.steps == 0 and sum(empty.phases.values()) == 0.0
    assert empty.samples_per_second == 0.0


def test_phases_of_all_steps_go_on_over_intervals() -> None:
    meter = Meter()
    for seconds in (1.0, 2.0, 4.0):
        meter.step(10, times(seconds))
        if seconds < 4:
            meter.interval()
    assert meter.total.phases["forward"] == meter.total.seconds == 7.0


def test_throughput_leaves_out_the_first_twenty_steps() -> None:
    meter = Meter()
    assert meter.samples_per_second == 0.0
    for _ in range(20):
        meter.step(100, times(10.0))
    assert meter.samples_per_second == 10.0
    for _ in range(5):
        meter.step(100, times(1.0))
    assert meter.samples_per_second == 100.0
    assert (meter.total.steps, meter.total.samples, meter.total.seconds) == (25, 2500, 205.0)
