"""Find the rank that slows down the others, from one small row per rank, gathered in each log interval.

In synchronous training, all ranks' steps take equally long, because fast ranks wait for slow ones in the
gradient all-reduce. Ranks differ in their own time: the step without that wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, median_low
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.messages import Ranks
from tandem.telemetry.meter import PHASES, StepTimes
from tandem.telemetry.metrics import Sample
from tandem.timeouts import NAME_SECONDS

MARK_RATIO = 1.2
"""A rank is marked if its quick steps take at least this many times those of the median rank."""
MARK_SHARE = 0.05
"""The extra time of a marked rank is at least this share of a step; less is not worth reporting."""
NAMED_ABOVE = 0.65
FORGOTTEN_BELOW = 0.25
MAX_RANK_SERIES = 64  # as registry.MAX_SERIES, beyond which samples are errors
MAX_TIMES = 1000
"""A rank's typical step is taken from this many of the last steps in an interval."""


@dataclass(frozen=True)
class RankTimes:
    """A rank's typical step in seconds: medians over an interval, so that one slow step does not matter.

    `own` is its own time and `step` all of it. `quick` is the lower quartile of its own time: a busy neighbor
    slows some steps, a slow rank all of them. `seconds` is the whole interval; `location` is the line of a
    script where most of it is spent, if known.
    """

    rank: int
    node: int
    own: float
    quick: float
    step: float
    seconds: float
    phases: tuple[float, ...]
    location: str = ""

    def phase(self, name: str) -> float:
        return self.phases[PHASES.index(name)]


ROW_LENGTH = 5 + len(PHASES)


def row_of(node: int, steps: Sequence[StepTimes]) -> list[float]:
    """Return the row that a rank contributes: its node and the values of `RankTimes`, or zeros."""
    if not steps:
        # The collective needs a row of the same length from every rank, also from one without steps.
        return [float(node)] + [0.0] * (ROW_LENGTH - 1)
    own = sorted(step.own for step in steps)
    whole = [step.total for step in steps]
    phases = [median(getattr(step, name) for step in steps) for name in PHASES]
    return [float(node), median(own), own[len(own) // 4], median(whole), sum(whole), *phases]


def from_rows(rows: Sequence[Sequence[float]]) -> list[RankTimes]:
    """Convert the gathered rows, one per rank in rank order, to `RankTimes`."""
    return [
        RankTimes(rank, round(node), own, quick, step, seconds, tuple(phases))
        for rank, (node, own, quick, step, seconds, *phases) in enumerate(rows)
    ]


class PendingGather:
    """An exchange of rows between ranks in progress; `work` is torch's handle, `gathered` a tensor."""

    def __init__(self, work: Any, own_row: object, gathered: Any) -> None:
        self._work = work
        self._gathered = gathered
        self._kept = own_row  # keeps the tensor alive until it is sent

    def is_done(self) -> bool:
        """Return True if `rows` would not wait."""
        return bool(self._work.is_completed())

    def rows(self) -> list[list[float]]:
        """Wait for the rows and return them in rank order."""
        self._work.wait()
        return [[float(value) for value in row] for row in self._gathered.tolist()]


@dataclass(frozen=True)
class RankComparison:
    """The comparison of ranks in an interval of `seconds`: the slowest, by how much, and in which phase.

    `marked`: the rank is clearly slower in this interval. `StragglerWatch` reports it after several of them.
    """

    fastest: float
    median: float
    slowest: float
    rank: int
    node: int
    phase: str
    excess: float
    seconds: float
    marked: bool
    location: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the fields of the event that reports it."""
        location = {"place": self.location} if self.location else {}
        seconds = {"own_seconds": self.slowest, "median_seconds": self.median}
        return {"rank": self.rank, "node": self.node, "phase": self.phase, **location, **seconds}

    def __str__(self) -> str:
        return (
            f"straggler: rank {self.rank} on node {self.node} needs {1e3 * self.slowest:.1f} ms per step "
            f"(median {1e3 * self.median:.1f} ms); "
            f"{f'most of it at {self.location}' if self.location else f'the extra time is in {self.phase}'}"
        )


def compare_ranks(ranks: Sequence[RankTimes]) -> RankComparison:
    """Compare the slowest rank of an interval with the median rank. `ranks` must not be empty.

    A rank is `marked` if its quick steps take at least MARK_RATIO times those of the median rank, and its
    typical steps are slower by at least half as much. Noise of a busy host lengthens every rank's typical
    steps, but not the quick steps of a rank that is not slow. The difference must also be at least MARK_SHARE
    of the step. The median is the lower of two middle ranks: of two ranks, the slower is compared with the
    faster.
    """
    middle = median_low(each.own for each in ranks)
    quick = median_low(each.quick for each in ranks)
    slow = max(ranks, key=lambda each: each.quick)
    typical = slow.own - middle >= max(middle * (MARK_RATIO - 1) / 2, slow.step * MARK_SHARE)
    # Rows of zeros are from ranks without steps.
    marked = typical and 0 < quick * MARK_RATIO <= slow.quick
    if not marked:
        # The metrics show a slowest rank in every interval; without a mark, the typical steps decide.
        slow = max(ranks, key=lambda each: each.own)
    excess = {name: slow.phase(name) - median_low(each.phase(name) for each in ranks) for name in PHASES}
    return RankComparison(
        fastest=min(each.own for each in ranks),
        median=middle,
        slowest=slow.own,
        rank=slow.rank,
        node=slow.node,
        phase=max(excess, key=lambda name: excess[name]),
        excess=slow.own - middle,
        seconds=max(each.seconds for each in ranks),
        marked=marked,
        location=slow.location,
    )


def _series_of(ranks: Sequence[RankTimes]) -> list[Sample]:
    # After an elastic restart, some ranks may be gone, or on another node.
    samples = [metrics.RANK_COMPUTE_SECONDS.clear(), metrics.RANK_DATA_SECONDS.clear()]
    for each in ranks:
        where = {"rank": each.rank, "node": each.node}
        samples.append(metrics.RANK_COMPUTE_SECONDS.set(each.own, **where))
        samples.append(metrics.RANK_DATA_SECONDS.set(each.phase("data"), **where))
    return samples


def samples_of(
    ranks: Sequence[RankTimes], comparison: RankComparison, named: RankComparison | None
) -> list[Sample]:
    """Return the metrics of an interval; series per rank only for up to MAX_RANK_SERIES ranks."""
    samples = [
        metrics.RANK_COMPUTE_SECONDS_MIN.set(comparison.fastest),
        metrics.RANK_COMPUTE_SECONDS_MEDIAN.set(comparison.median),
        metrics.RANK_COMPUTE_SECONDS_MAX.set(comparison.slowest),
        metrics.SLOWEST_RANK.set(comparison.rank),
        metrics.TYPICAL_STEP_SECONDS.set(median_low(each.step for each in ranks)),
        # The series of an earlier straggler must vanish: absent means none.
        metrics.STRAGGLER_EXCESS_SECONDS.clear(),
    ]
    if len(ranks) <= MAX_RANK_SERIES:
        samples += _series_of(ranks)
    if named is not None:
        name = {"rank": named.rank, "node": named.node, "phase": named.phase}
        samples.append(metrics.STRAGGLER_EXCESS_SECONDS.set(named.excess, **name))
    return samples


def rows_for_page(ranks: Sequence[RankTimes], named: RankComparison | None) -> Ranks:
    """Return rows for the live page: milliseconds by phase, only of the slowest ranks if there are many."""
    shown = sorted(sorted(ranks, key=lambda each: -each.own)[:MAX_RANK_SERIES], key=lambda each: each.rank)
    rows = [
        {
            "rank": each.rank,
            "node": each.node,
            "own_ms": round(1e3 * each.own, 3),
            "phases_ms": {name: round(1e3 * each.phase(name), 3) for name in PHASES},
            "straggler": named is not None and each.rank == named.rank,
        }
        for each in shown
    ]
    return Ranks(rows, None if named is None else str(named))


class Stragglers:
    """This rank's steps since the last interval, and an exchange of all ranks' rows in progress."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._times: deque[StepTimes] = deque(maxlen=MAX_TIMES)
        self._pending: PendingGather | None = None

    def record(self, times: Sequence[StepTimes]) -> None:
        self._times += times

    def gather(self, exchange: Callable[[list[float]], PendingGather]) -> list[RankTimes]:
        """Start to gather every rank's row without waiting; return the result of the previous exchange."""
        # One exchange at a time, because all ranks must take part in collectives in the same order.
        # See docs/architecture.md#measuring-a-ranks-own-time.
        before = self.arrived(wait=True)
        self._pending = exchange(row_of(self._node, self._times))
        self._times.clear()
        return before

    def arrived(self, wait: bool = False) -> list[RankTimes]:
        """Return all ranks' times once, when their rows have arrived and contain steps; else empty."""
        if self._pending is None or not (wait or self._pending.is_done()):
            return []
        ranks = from_rows(self._pending.rows())
        self._pending = None
        return ranks if any(each.own for each in ranks) else []


@dataclass(frozen=True)
class Report:
    """Rank 0's report of an interval: metrics, the page's rows, and a newly found straggler."""

    samples: list[Sample]
    page: Ranks
    new_straggler: RankComparison | None


class StragglerWatch:
    """Finds stragglers: ranks that are marked in several intervals.

    For each rank, the share of marked intervals is tracked. An interval of t seconds has the weight t /
    NAME_SECONDS, at most one sixth. A rank is reported when its share exceeds NAMED_ABOVE, which takes about
    NAME_SECONDS of marks and at least six intervals, and until it falls below FORGOTTEN_BELOW.
    """

    def __init__(self) -> None:
        self.named: RankComparison | None = None
        self._shares: dict[int, float] = {}

    def report(self, ranks: Sequence[RankTimes]) -> Report:
        comparison = compare_ranks(ranks)
        new_straggler = self.update(comparison)
        return Report(
            samples_of(ranks, comparison, self.named), rows_for_page(ranks, self.named), new_straggler
        )

    def update(self, comparison: RankComparison) -> RankComparison | None:
        """Update `named`, the current straggler if any; return the comparison if it is a new one."""
        weight = min(comparison.seconds / NAME_SECONDS, 1 / 6)
        marked = comparison.rank if comparison.marked else None
        shares = {rank: (1 - weight) * share for rank, share in self._shares.items()}
        if marked is not None:
            shares[marked] = shares.get(marked, 0.0) + weight
        self._shares = {rank: share for rank, share in shares.items() if share > 0.01}
        before = None if self.named is None else self.named.rank
        # The two limits are far apart, so that a rank near one of them is not reported again and again.
        if before is not None and self._shares.get(before, 0.0) < FORGOTTEN_BELOW:
            self.named = None
        if marked is not None and (marked == before or shares[marked] > NAMED_ABOVE):
            self.named = comparison
        return self.named if self.named is not None and self.named.rank != before else None
