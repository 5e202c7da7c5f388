"""Which nodes stay out, from what all of them measured."""

import itertools

import pytest

from tandem.launch import join_rules as rules
from tandem.launch.join_rules import ClockOffset, LinkRate

GOOD = 1e9


@pytest.mark.parametrize("count", range(1, 10))
def test_each_node_meets_each_other_one_once(count: int) -> None:
    nodes = list(range(10, 10 + count))
    met = [pair for number in range(rules.rounds_of(nodes)) for pair in rules.pairs_of_round(nodes, number)]
    assert sorted(map(sorted, met)) == [list(each) for each in itertools.combinations(nodes, 2)]
    for number in range(rules.rounds_of(nodes)):
        in_round = [node for pair in rules.pairs_of_round(nodes, number) for node in pair]
        assert len(in_round) == len(set(in_round)) == count - count % 2


def offsets(*ahead: float, uncertainty: float = 0.01) -> dict[int, ClockOffset]:
    return {node: ClockOffset(each, uncertainty) for node, each in enumerate(ahead)}


@pytest.mark.parametrize(("ahead", "wrong"), [
    ((), {}),
    ((0.0, 1.9, -0.1), {}),
    ((0.0, 0.1, 60.0, 0.2), {2: 59.9}),
    ((0.0, -60.0, -60.1, -60.2), {0: 60.1}),
    ((0.0, 60.0), None),
    ((0.0, 0.0, 60.0, 60.0), None),
    ((0.0, 60.0, 120.0), None),
])  # fmt: skip
def test_the_clock_that_differs_from_most_is_wrong(
    ahead: tuple[float, ...], wrong: dict[int, float] | None
) -> None:
    assert rules.wrong_clocks(offsets(*ahead)) == (wrong if wrong is None else pytest.approx(wrong))


def test_a_clock_that_was_read_late_is_not_wrong() -> None:
    assert rules.wrong_clocks(offsets(0.0, 0.0, 5.0, uncertainty=2.0)) == {}


def test_far_below_is_less_than_a_third_of_the_median_of_the_others() -> None:
    assert rules.far_below({0: 100.0, 1: 110.0, 2: 34.0}) == {}
    assert rules.far_below({0: 100.0, 1: 100.0, 2: 10.0}) == {2: 0.1}
    assert rules.far_below({0: 1.0}) == {} and rules.far_below({}) == {}
    # A node that is much faster makes no other one slow.
    assert rules.far_below({0: 1000.0, 1: 100.0, 2: 100.0}) == {}


def links_of(nodes: int, bad: dict[int, float]) -> tuple[list[LinkRate], int]:
    """The links measured until no more are needed, where each node has the given share of the rate."""
    links = list[LinkRate]()
    rounds = 0
    while rules.needs_another_round(range(nodes), links, rounds):
        for first, second in rules.pairs_of_round(range(nodes), rounds):
            share = min(bad.get(first, 1.0), bad.get(second, 1.0))
            links.append(LinkRate(first, second, share * GOOD, 0.001))
        rounds += 1
    return links, rounds


@pytest.mark.parametrize("nodes", range(3, 12))
def test_the_slow_node_of_a_pair_is_the_one_that_is_slow_with_both_partners(nodes: int) -> None:
    for bad in range(nodes):
        links, rounds = links_of(nodes, {bad: 0.1})
        assert [node for node, count in rules.slow_links(links).items() if count >= rules.PARTNERS] == [bad]
        assert rounds <= 3


@pytest.mark.parametrize("nodes", range(2, 12))
def test_healthy_nodes_need_one_round_if_their_number_is_even(nodes: int) -> None:
    links, rounds = links_of(nodes, {})
    assert rules.slow_links(links) == {} and rounds == {3: 3}.get(nodes, 1 + nodes % 2)


def test_one_slow_pair_names_nobody() -> None:
    links = [LinkRate(0, 1, GOOD, 0.001), LinkRate(2, 3, GOOD / 10, 0.001), LinkRate(0, 2, GOOD, 0.001)]
    links.append(LinkRate(1, 3, GOOD, 0.001))
    assert rules.slow_links(links) == {}


def test_of_two_nodes_none_can_be_named() -> None:
    links, rounds = links_of(2, {1: 0.0})
    assert rules.slow_links(links) == {} and rounds == 1


def test_a_node_that_cannot_be_reached_is_named() -> None:
    assert rules.slow_links(links_of(4, {2: 0.0})[0]) == {2: 2}


def test_a_long_round_trip_is_named_as_well() -> None:
    links = [
        LinkRate(first, second, GOOD, 0.05 if 3 in (first, second) else 0.001)
        for first, second in itertools.combinations(range(4), 2)
    ]
    assert rules.slow_links(links) == {3: 3}
    # Ten times a tiny round trip is still tiny: a busy core takes as long.
    links = [each._replace(latency=each.latency / 20) for each in links]
    assert rules.slow_links(links) == {}
