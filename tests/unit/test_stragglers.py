"""From rows of numbers to a name: the right rank, the right phase, and nobody where nobody is slow."""

import math
import random
from collections.abc import Iterator

import pytest

from tandem.telemetry.meter import StepTimes
from tandem.telemetry.registry import Registry
from tandem.telemetry.stragglers import (
    MAX_RANK_SERIES,
    ROW_LENGTH,
    StragglerWatch,
    compare_ranks,
    from_rows,
    row_of,
    rows_for_page,
    samples_of,
)


def steps(forward: float, count: int = 20, noise: float = 0.0, seed: int = 0) -> list[StepTimes]:
    draw = random.Random(seed)
    return [
        StepTimes(0.001, 0.0, forward * (1 + abs(draw.gauss(0, noise))), 0.01, 0.001, 0.0, wait=0.05)
        for _ in range(count)
    ]


def rows(*forwards: float) -> list[list[float]]:
    return [row_of(rank // 2, steps(forward)) for rank, forward in enumerate(forwards)]


def test_the_wait_is_not_a_ranks_own() -> None:
    assert steps(0.02)[0].own == pytest.approx(0.032)
    assert sum(steps(0.02)[0].phases().values()) == pytest.approx(steps(0.02)[0].total)


@pytest.mark.parametrize("slow", range(4))
def test_the_slow_rank_is_named_with_node_and_phase(slow: int) -> None:
    verdict = compare_ranks(from_rows(rows(*(0.03 if rank == slow else 0.02 for rank in range(4)))))
    assert (verdict.rank, verdict.node, verdict.phase, verdict.marked) == (slow, slow // 2, "forward", True)
    assert verdict.excess == pytest.approx(0.01)
    assert f"rank {slow} on node {slow // 2}" in str(verdict) and "forward" in str(verdict)


def test_of_two_ranks_the_slower_is_compared_with_the_faster() -> None:
    verdict = compare_ranks(from_rows([row_of(0, steps(0.0)), row_of(1, steps(0.004))]))
    assert verdict.slowest / verdict.median == pytest.approx(16 / 12)
    assert verdict.marked and verdict.rank == 1


def test_a_few_slow_steps_and_a_lone_rank_are_no_straggler() -> None:
    disturbed = steps(0.02, 12) + steps(0.2, 8)
    assert not compare_ranks(from_rows([row_of(0, steps(0.02)), row_of(0, disturbed)])).marked
    mostly_disturbed = steps(0.02, 8) + steps(0.2, 12)  # slow more often than not, but not in every step
    assert not compare_ranks(from_rows([row_of(0, steps(0.02)), row_of(0, mostly_disturbed)])).marked
    assert not compare_ranks(from_rows(rows(0.02))).marked


def test_noise_names_the_right_one_and_nobody_else() -> None:
    for trial in range(200):
        noisy = [row_of(0, steps(0.02, noise=0.1, seed=4 * trial + rank)) for rank in range(4)]
        assert not compare_ranks(from_rows(noisy)).marked
        noisy[trial % 4] = row_of(0, steps(0.031, noise=0.1, seed=trial))
        verdict = compare_ranks(from_rows(noisy))
        assert verdict.marked and verdict.rank == trial % 4


def test_a_rank_without_steps_has_a_row_as_well() -> None:
    assert row_of(3, []) == [3.0] + [0.0] * (ROW_LENGTH - 1)
    assert not compare_ranks(from_rows([row_of(0, []), row_of(1, [])])).marked


def test_series_follow_the_world_and_end_at_64_ranks() -> None:
    metrics = Registry()

    def series(name: str) -> int:
        return metrics.page().decode().count(f"\n{name}{{")

    for ranks in (4, 2, MAX_RANK_SERIES):
        found = from_rows(rows(*[0.02] * (ranks - 1), 0.04))
        metrics.apply(samples_of(found, compare_ranks(found), named=compare_ranks(found)))
        assert series("tandem_rank_compute_seconds") == series("tandem_rank_data_seconds") == ranks
        assert series("tandem_straggler_excess_seconds") == 1
    many = from_rows(rows(*[0.02] * 200))
    metrics.apply(samples_of(many, compare_ranks(many), named=None))
    assert series("tandem_straggler_excess_seconds") == 0
    assert metrics.registry.get_sample_value("tandem_rank_compute_seconds_max") == pytest.approx(0.032)
    assert "tandem_collect_errors_total{" not in metrics.page().decode()


def test_the_page_shows_the_slowest_of_many() -> None:
    many = from_rows(rows(*[0.02] * 199, 0.04))
    message = rows_for_page(many, named=compare_ranks(many))
    assert len(message.rows) == MAX_RANK_SERIES
    assert message.rows[-1]["straggler"] and message.rows[-1]["rank"] == 199
    assert "rank 199" in str(message.says)


def test_a_small_share_of_the_step_is_no_straggler() -> None:
    def row(own: float, wait: float) -> list[float]:
        return row_of(0, [StepTimes(0.0, 0.0, own, 0.0, 0.0, 0.0, wait)] * 20)

    assert compare_ranks(from_rows([row(0.010, 0.09), row(0.016, 0.084)])).marked
    assert not compare_ranks(from_rows([row(0.010, 0.09), row(0.0149, 0.0851)])).marked


def told(watch: StragglerWatch, marks: list[int | None], seconds: float) -> list[int | None]:
    """Who is named after each interval in which a rank of three was marked, or nobody."""
    names = []
    for mark in marks:
        count = round(seconds / 0.1)
        slow = [steps(0.08 if rank == mark else 0.05, count) for rank in range(3)]
        for each in (each for rank in slow for each in rank):
            each.wait = 0.1 - each.own  # in synchronous training all steps last equally long
        watch.update(compare_ranks(from_rows([row_of(0, rank) for rank in slow])))
        names.append(None if watch.named is None else watch.named.rank)
    return names


@pytest.mark.parametrize("seconds, soonest", [(0.5, 21), (1.0, 10), (3.0, 6), (60.0, 6)])
def test_a_name_takes_ten_seconds_and_six_intervals_and_goes_as_slowly(seconds: float, soonest: int) -> None:
    watch = StragglerWatch()
    assert told(watch, [2] * (soonest + 2), seconds) == [None] * (soonest - 1) + [2] * 3
    assert told(watch, [None, 2] * 10, seconds) == [2] * 20  # most of the time is enough to keep it
    assert told(watch, [None] * 2 * soonest, seconds)[-1] is None


def test_another_one_in_each_interval_is_nobody() -> None:
    assert told(StragglerWatch(), [0, 1, 2, 2, 0, 1, None, 1, 0, 0, 2] * 20, 1.0) == [None] * 220


def test_news_come_once_for_each_name() -> None:
    watch = StragglerWatch()
    slow, clean = compare_ranks(from_rows(rows(0.02, 0.04))), compare_ranks(from_rows(rows(0.02, 0.02)))
    heard = [watch.update(verdict) is not None for verdict in [slow] * 30 + [clean] * 30 + [slow] * 30]
    assert sum(heard[:30]) == 1 and sum(heard[30:60]) == 0 and sum(heard[60:]) == 1
    assert watch.named is slow


def busy_host(slowed: float, count: int, seed: int) -> Iterator[list[list[float]]]:
    """Intervals of two alike ranks on a host with many more runnable processes than cores, without end.

    The second rank takes `slowed` times as long. The noise is that of real runs there, in the logarithm of a
    step's own time: what both feel alike (a standard deviation of 0.47 that lasts for tens of steps), and
    what one feels alone (0.26, a half of it lasting several steps).
    """
    draw = random.Random(seed)
    common, alone = 0.0, [0.0, 0.0]
    while True:
        taken: tuple[list[StepTimes], list[StepTimes]] = ([], [])
        for _ in range(count):
            common = 0.97 * common + draw.gauss(0, 0.47 * math.sqrt(1 - 0.97**2))
            alone = [0.85 * each + draw.gauss(0, 0.18 * math.sqrt(1 - 0.85**2)) for each in alone]
            own = [0.1 * math.exp(common + each + draw.gauss(0, 0.18)) for each in alone]
            own[1] *= slowed
            for rank in range(2):
                taken[rank].append(StepTimes(0.0, 0.0, own[rank], 0.0, 0.0, 0.0, wait=max(own) - own[rank]))
        yield [row_of(rank, taken[rank]) for rank in range(2)]


@pytest.mark.parametrize("count", [20, 50])
def test_of_two_alike_ranks_on_a_busy_host_none_is_named_and_a_slowed_one_is(count: int) -> None:
    windows, marks, alarms, missed = 200, 0, 0, 0
    for seed in range(4):
        alike, slowed = StragglerWatch(), StragglerWatch()
        for _, found in zip(range(windows), busy_host(1.0, count, seed), strict=False):
            verdict = compare_ranks(from_rows(found))
            alike.update(verdict)
            marks, alarms = marks + verdict.marked, alarms + (alike.named is not None)
        for at, found in zip(range(windows), busy_host(1.33, count, seed), strict=False):
            slowed.update(compare_ranks(from_rows(found)))
            missed += at >= 20 and (slowed.named is None or slowed.named.rank != 1)
    assert marks > 0.1 * 4 * windows  # the noise is as real ranks have it, see NAME_SECONDS
    assert alarms < 0.01 * 4 * windows and missed < 0.05 * 4 * windows
