"""Cadences and learning rates: pure functions of the step."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.config import Settings
from tandem.schedule import (
    Cadence,
    LrSchedule,
    learning_rate,
    scale_lr,
    scaling_of,
)
from tandem.training.optim import LearningRates

SCHEDULES: list[LrSchedule] = ["constant", "linear", "cosine", "step"]
SIZES = st.integers(1, 300)
STEP_CADENCES = st.one_of(
    st.integers(1, 50).map(str),
    st.integers(1, 30).map(lambda tenths: f"{tenths / 10}epochs"),
    st.integers(1, 100).map(lambda percent: f"{percent}%"),
)


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("200", 200, "steps"),
        ("1step", 1, "steps"),
        ("1epoch", 1, "epochs"),
        ("2epochs", 2, "epochs"),
        ("0.5epoch", 0.5, "epochs"),
        ("30s", 30, "seconds"),
        ("0.5s", 0.5, "seconds"),
        ("10m", 600, "seconds"),
        ("1.5min", 90, "seconds"),
        ("2h", 7200, "seconds"),
        ("10%", 10, "percent"),
        ("0", 0, "never"),
        ("0epochs", 0, "never"),
        ("never", 0, "never"),
    ],
)
def test_parse(text: str, value: float, unit: str) -> None:
    cadence = Cadence.parse(text)
    assert (cadence.value, cadence.unit) == (value, unit)


@pytest.mark.parametrize(
    "text", ["", "-1", "1.5", "101%", "epoch", "5x", "1e3", "nan", "inf", "10 %", " 1", "٣", "9" * 400]
)
def test_parse_refuses_and_says_what_is_valid(text: str) -> None:
    with pytest.raises(ValueError, match="200 .steps., 1epoch, 30s, 10m, 10% or never"):
        Cadence.parse(text)


def due_steps(text: str, steps_per_epoch: int, steps_planned: int) -> list[int]:
    cadence = Cadence.parse(text)
    return [s for s in range(steps_planned + 1) if cadence.is_due(s, steps_per_epoch, steps_planned)]


def test_due_steps() -> None:
    assert due_steps("4", 10, 10) == [4, 8]
    assert due_steps("1epoch", 5, 12) == [5, 10]
    assert due_steps("0.7epochs", 10, 30) == [7, 14, 21, 28]
    assert due_steps("10%", 7, 1005) == [101, 201, 302, 402, 503, 603, 704, 804, 905, 1005]
    assert due_steps("1%", 10, 5) == [1, 2, 3, 4, 5]
    assert due_steps("never", 5, 12) == due_steps("1s", 5, 12) == []
    assert due_steps("1epoch", 0, 12) == []


@given(STEP_CADENCES, SIZES, SIZES)
def test_due_steps_are_evenly_spread_and_begin_at_to_steps(text: str, per_epoch: int, planned: int) -> None:
    due = due_steps(text, per_epoch, planned)
    first = Cadence.parse(text).to_steps(per_epoch, planned)
    assert first is not None and first >= 1
    assert (due[0] == first) if due else (first > planned)
    gaps = {after - before for before, after in zip(due, due[1:], strict=False)}
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(1, 100), st.integers(100, 5000))
def test_a_percentage_that_divides_is_due_at_the_last_step(percent: int, planned: int) -> None:
    due = Cadence(percent, "percent").is_due(planned, 1, planned)
    assert due or 100 % percent


def test_time_is_due_by_time_only() -> None:
    cadence = Cadence.parse("30s")
    assert not cadence.is_due_by_time(29.9)
    assert cadence.is_due_by_time(30.0)
    assert not Cadence.parse("1").is_due_by_time(1e9)
    assert cadence.to_steps(10, 100) is None
    assert Cadence.parse("never").to_steps(10, 100) is None


def test_scale_lr() -> None:
    assert scale_lr(0.1, "none", 960, 240) == 0.1
    assert scale_lr(0.1, "linear", 960, 240) == pytest.approx(0.4)
    assert scale_lr(0.1, "sqrt", 960, 240) == pytest.approx(0.2)


def rates(schedule: LrSchedule, warmup: int, planned: int, peak: float = 1.0) -> list[float]:
    return [
        learning_rate(s, peak=peak, warmup_steps=warmup, steps_planned=planned, schedule=schedule)
        for s in range(planned + 3)
    ]


@given(st.sampled_from(SCHEDULES), st.integers(0, 60), st.integers(1, 200), st.floats(1e-6, 10))
def test_rate_rises_to_the_peak_and_never_again(
    schedule: LrSchedule, warmup: int, planned: int, peak: float
) -> None:
    values = rates(schedule, warmup, planned, peak)
    assert all(0 <= value <= peak * (1 + 1e-12) for value in values)
    assert all(value > 0 for value in values[:planned])
    rise, fall = values[:warmup], values[warmup:]
    assert rise == sorted(rise)
    assert all(after <= before * (1 + 1e-12) for before, after in zip(fall, fall[1:], strict=False))
    if warmup < planned:
        assert max(values) == pytest.approx(peak)


def test_warmup_is_linear_and_ends_at_the_peak() -> None:
    assert rates("constant", 4, 6)[:6] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert rates("constant", 0, 2)[0] == 1.0


@given(
    st.sampled_from(["linear", "sqrt"]), st.integers(1, 10_000), st.integers(1, 10_000), st.floats(1e-6, 10)
)  # fmt: skip
def test_scaling_can_be_undone(text: str, batch: int, base: int, lr: float) -> None:
    rule, found = scaling_of(f"{text}:{base}")
    assert (rule, found) == (text, base)
    there = scale_lr(lr, rule, batch, base)
    assert scale_lr(there, rule, base, batch) == pytest.approx(lr)
    assert (there >= lr) == (batch >= base) or there == pytest.approx(lr)


def test_scaling_without_a_batch_size() -> None:
    assert scaling_of("none") == ("none", 240) and scaling_of("sqrt") == ("sqrt", 240)


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, "lr 0.1, cosine to step 4,000"),
        (
            {"lr_scaling": "linear", "batch_size": 480, "warmup": "5%"},
            "lr 0.1 x 480/240 (linear) = 0.2, warm-up linear over 200 steps, then cosine to step 4,000",
        ),
        (
            {
                "lr_scaling": "sqrt:240",
                "optimizer": "adamw",
                "batch_size": 960,
                "lr": 1e-3,
                "schedule": "constant",
            },
            "lr 0.001 x sqrt(960/240) (sqrt) = 0.002, constant",
        ),
        (
            {"warmup": "2epochs", "schedule": "step"},
            "lr 0.1, warm-up linear over 200 steps, then step to step 4,000",
        ),
    ],
)
def test_the_arithmetic_is_one_line(settings: dict[str, Any], expected: str) -> None:
    made = Settings().replace(**settings)
    found = LearningRates(made.optimization, made.data.batch_size, 100, 4000)
    assert str(found) == expected
    assert max(map(found.at, range(4000))) == pytest.approx(found.peak)


def test_shapes() -> None:
    assert rates("linear", 0, 4) == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0]
    cosine = rates("cosine", 0, 4)
    assert cosine[2] == pytest.approx(0.5) and cosine[1] == pytest.approx(0.5 + math.sqrt(2) / 4)
    assert cosine[4] == cosine[6] == pytest.approx(0.0)
    stairs = rates("step", 0, 90)
    assert [s for s in range(1, 90) if stairs[s] != stairs[s - 1]] == [30, 60, 80]
    assert stairs[80] == pytest.approx(1e-3)
