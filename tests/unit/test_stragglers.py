"""From rows of numbers to a name: the right rank, the right phase, and nobody where nobody is slow."""

import random

import pytest

from tandem.telemetry.meter import StepTimes
from tandem.telemetry.registry import Registry
from tandem.telemetry.stragglers import (
    MAX_RANK_SERIES,
    ROW_LENGTH,
    StragglerWatch,
    from_rows,
    judge,
    row_of,
    rows_for_page,
    samples_of,
)


def steps(forward: float, count: int = 20, noise: float = 0.0, seed: int = 0) -> list[StepTimes]:
    draw = random.Random(seed)
    return [
        StepTimes(0.001, 0.0, forward * (1 + abs(draw.gauss(0, noise))), 0.01, 0.001, 0.0, wait=0.5)
        for _ in range(count)
    ]


def rows(*forwards: float) -> list[list[float]]:
    return [row_of(rank // 2, steps(forward)) for rank, forward in enumerate(forwards)]


def test_the_wait_is_not_a_ranks_own() -> None:
    assert steps(0.02)[0].own == pytest.approx(0.032)
    assert sum(steps(0.02)[0].phases().values()) == pytest.approx(steps(0.02)[0].total)


@pytest.mark.parametrize("slow", range(4))
def test_the_slow_rank_is_named_with_node_and_phase(slow: int) -> None:
    verdict = judge(from_rows(rows(*(0.03 if rank == slow else 0.02 for rank in range(4)))))
    assert (verdict.rank, verdict.node, verdict.phase, verdict.marked) == (slow, slow // 2, "forward", True)
    assert verdict.excess == pytest.approx(0.01)
    assert f"rank {slow} on node {slow // 2}" in str(verdict) and "forward" in str(verdict)


def test_of_two_ranks_the_slower_is_compared_with_the_faster() -> None:
    verdict = judge(from_rows([row_of(0, steps(0.0)), row_of(1, steps(0.004))]))
    assert verdict.slowest / verdict.median == pytest.approx(16 / 12)
    assert verdict.marked and verdict.rank == 1


def test_a_few_slow_steps_and_a_lone_rank_are_no_straggler() -> None:
    disturbed = steps(0.02, 12) + steps(0.2, 8)
    assert not judge(from_rows([row_of(0, steps(0.02)), row_of(0, disturbed)])).marked
    mostly_disturbed = steps(0.02, 8) + steps(0.2, 12)  # slow more often than not, but not in every step
    assert not judge(from_rows([row_of(0, steps(0.02)), row_of(0, mostly_disturbed)])).marked
    assert not judge(from_rows(rows(0.02))).marked


def test_noise_names_the_right_one_and_nobody_else() -> None:
    for trial in range(200):
        noisy = [row_of(0, steps(0.02, noise=0.1, seed=4 * trial + rank)) for rank in range(4)]
        assert not judge(from_rows(noisy)).marked
        noisy[trial % 4] = row_of(0, steps(0.031, noise=0.1, seed=trial))
        verdict = judge(from_rows(noisy))
        assert verdict.marked and verdict.rank == trial % 4


def test_a_rank_without_steps_has_a_row_as_well() -> None:
    assert row_of(3, []) == [3.0] + [0.0] * (ROW_LENGTH - 1)
    assert not judge(from_rows([row_of(0, []), row_of(1, [])])).marked


def test_series_follow_the_world_and_end_at_64_ranks() -> None:
    metrics = Registry()

    def series(name: str) -> int:
        return metrics.page().decode().count(f"\n{name}{{")

    for ranks in (4, 2, MAX_RANK_SERIES):
        found = from_rows(rows(*[0.02] * (ranks - 1), 0.04))
        metrics.apply(samples_of(found, judge(found)))
        assert series("tandem_rank_compute_seconds") == series("tandem_rank_data_seconds") == ranks
        assert series("tandem_straggler_excess_seconds") == 1
    many = from_rows(rows(*[0.02] * 200))
    metrics.apply(samples_of(many, judge(many)))
    assert series("tandem_straggler_excess_seconds") == 0
    assert metrics.registry.get_sample_value("tandem_rank_compute_seconds_max") == pytest.approx(0.032)
    assert "tandem_collect_errors_total{" not in metrics.page().decode()


def test_the_page_shows_the_slowest_of_many() -> None:
    many = from_rows(rows(*[0.02] * 199, 0.04))
    message = rows_for_page(many, judge(many))
    assert len(message.rows) == MAX_RANK_SERIES
    assert message.rows[-1]["straggler"] and message.rows[-1]["rank"] == 199
    assert "rank 199" in str(message.says)


def test_news_come_once_and_never_from_one_row() -> None:
    watch = StragglerWatch()
    slow, clean = judge(from_rows(rows(0.02, 0.04))), judge(from_rows(rows(0.02, 0.02)))
    told = [watch.news(verdict) is not None for verdict in (slow, clean, slow, slow, slow, clean, slow, slow)]
    assert told == [False, False, False, True, False, False, False, False]
    assert watch.named is slow
    watch.news(clean)
    watch.news(clean)
    assert watch.named is None
