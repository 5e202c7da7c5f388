"""Decide which nodes stay out of a job, from what all of them measured. Pure: no store, clock or socket.

Every limit is relative to the other nodes, and wide: a node is reported as slow only if it has less than a
third of the others' speed at every attempt. A slow link has two ends, so a node is reported only if its links
to two different partners are slow.
"""

import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from tandem.timeouts import CLOCK_SKEW_SECONDS

ENOUGH_SHARED_BYTES = 256 * 2**20
"""Docker's default is 64 MiB, which a few batches of images in loader processes fill."""
SLOW_SHARE = 1 / 3
"""Share of the other nodes' median. Equal nodes on a busy machine differ by less, see `OwnTime`.

With an even number of others, the worse of the two middle values counts: one fast node of three must not make
the other two look slow.
"""
SLOW_LATENCY = 10
LEAST_LATENCY_SECONDS = 0.005
"""A round trip is too slow if it is SLOW_LATENCY times the others' median, and this much longer."""
PARTNERS = 2
"""The number of partners with which a node's link must be slow."""
NOBODY = -1

Key = TypeVar("Key", bound=Hashable)


class ClockOffset(NamedTuple):
    """The seconds by which a clock is ahead of node 0's, and the uncertainty of that number."""

    ahead: float
    uncertainty: float


class LinkRate(NamedTuple):
    """The link of two nodes: bytes/s in the slower direction (0: no connection), round trip in seconds."""

    first: int
    second: int
    rate: float
    latency: float

    def partner_of(self, node: int) -> int | None:
        """Return the node at the other end; None if `node` is at neither end."""
        return {self.first: self.second, self.second: self.first}.get(node)


def pairs_of_round(nodes: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Pair the nodes; no pair recurs within `rounds_of` rounds. With an odd number, one node pauses.

    This is the circle method of round-robin tournaments: one keeps its seat, the others move by one.
    """
    seats = [*nodes, NOBODY] if len(nodes) % 2 else [*nodes]
    if len(seats) < 2:
        return []
    turn = 1 + number % (len(seats) - 1)
    seats[1:] = seats[turn:] + seats[1:turn]
    half = len(seats) // 2
    return [(a, b) for a, b in zip(seats[:half], reversed(seats[half:]), strict=True) if NOBODY not in (a, b)]


def rounds_of(nodes: Sequence[int]) -> int:
    """Return after how many rounds each node has met each other node."""
    return len(nodes) - 1 + len(nodes) % 2


def wrong_clocks(offsets: Mapping[int, ClockOffset]) -> dict[int, float] | None:
    """Return the nodes whose clock differs from most others', with the seconds by which it is ahead.

    Returns None if clocks differ, but no majority agrees: with two nodes, either may be wrong.
    """
    if not offsets:
        return {}

    def agreeing(node: int) -> list[int]:
        return [other for other in offsets if _agree(offsets[node], offsets[other])]

    right = max((agreeing(node) for node in offsets), key=len)
    if len(right) == len(offsets):
        return {}
    if 2 * len(right) <= len(offsets):
        return None
    reference = statistics.median(offsets[node].ahead for node in right)
    return {node: each.ahead - reference for node, each in offsets.items() if node not in right}


def _agree(one: ClockOffset, other: ClockOffset) -> bool:
    return abs(one.ahead - other.ahead) <= CLOCK_SKEW_SECONDS + one.uncertainty + other.uncertainty


def far_below(values: Mapping[Key, float]) -> dict[Key, float]:
    """Return the keys below SLOW_SHARE of the others' median, with their share of that median.

    `values` may be each device's best attempt, in any unit of speed. A key without others is never below.
    """
    shares = dict[Key, float]()
    for key, value in values.items():
        others = [each for other, each in values.items() if other != key]
        if others and value < SLOW_SHARE * (median := statistics.median_low(others)):
            shares[key] = value / median
    return shares


def slow_links(links: Sequence[LinkRate]) -> dict[int, int]:
    """Return the nodes whose links are all slow, with the number of partners tried.

    A link is compared with the links between other nodes; without any, no node is slow.
    """
    found = dict[int, int]()
    for node in sorted({each for link in links for each in (link.first, link.second)}):
        own = [link for link in links if link.partner_of(node) is not None]
        others = [link for link in links if link.partner_of(node) is None and link.rate > 0]
        if others and all(_is_slow(link, others) for link in own):
            found[node] = len({link.partner_of(node) for link in own})
    return found


def _is_slow(link: LinkRate, others: Sequence[LinkRate]) -> bool:
    latency = statistics.median_high(each.latency for each in others)
    is_late = link.latency > max(SLOW_LATENCY * latency, latency + LEAST_LATENCY_SECONDS)
    return is_late or link.rate < SLOW_SHARE * statistics.median_low(each.rate for each in others)


def needs_another_round(nodes: Sequence[int], links: Sequence[LinkRate], rounds: int) -> bool:
    """Return whether a node has no link yet, no link to compare with, or too few partners to be sure."""
    if rounds >= rounds_of(nodes):
        return False
    for node in nodes:
        own = sum(link.partner_of(node) is not None for link in links)
        if not 0 < own < len(links):
            return True
    return any(count < PARTNERS for count in slow_links(links).values())
