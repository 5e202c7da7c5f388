"""Who holds the others back: from one small row per rank, gathered at the log cadence, to a name.

In synchronous training all steps last equally long, because the fast wait for the slow in the gradient
all-reduce. What differs is a rank's own time: the step without that wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median, median_low
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.messages import Ranks
from tandem.telemetry.meter import PHASES, StepTimes

MARK_RATIO = 1.2
"""A rank is marked when its quick steps take this many times the median rank's; see `judge`."""
MAX_RANK_SERIES = 64
MAX_TIMES = 1000
"""Steps that a rank's typical step is taken from, the last of an interval."""


@dataclass(frozen=True)
class RankTimes:
    """A rank's typical step: medians over an interval, so that one slow step names nobody. Seconds.

    `quick` is the lower quartile of its own time: a busy neighbour slows some steps, a slow rank all.
    """

    rank: int
    node: int
    own: float
    quick: float
    data: float
    transfer: float
    forward: float
    backward: float
    optimizer: float
    other: float

    def phase(self, name: str) -> float:
        return float(getattr(self, name))


ROW_LENGTH = len(fields(RankTimes)) - 1  # the rank is the row's index


def row_of(node: int, steps: Sequence[StepTimes]) -> list[float]:
    """What a rank hands to the gather: its node and the medians of its steps (zeros without any)."""
    if not steps:
        return [float(node)] + [0.0] * (ROW_LENGTH - 1)
    own = sorted(step.own for step in steps)
    return [
        float(node),
        median(own),
        own[len(own) // 4],
        *(median(getattr(step, name) for step in steps) for name in PHASES),
    ]


def from_rows(rows: Sequence[Sequence[float]]) -> list[RankTimes]:
    """The gathered rows, one per rank in rank order, as `RankTimes`."""
    return [RankTimes(rank, round(row[0]), *map(float, row[1:ROW_LENGTH])) for rank, row in enumerate(rows)]


class Gathering:
    """An exchange of rows between ranks that is under way; `work` is torch's, `everyones` a tensor."""

    def __init__(self, work: Any, mine: object, everyones: Any) -> None:
        self._work, self._everyones = work, everyones
        self._kept = mine  # until it is sent

    def is_here(self) -> bool:
        """Whether `rows` would not wait."""
        return bool(self._work.is_completed())

    def rows(self) -> list[list[float]]:
        """The rows, in rank order; waits for them."""
        self._work.wait()
        return [[float(value) for value in row] for row in self._everyones.tolist()]


@dataclass(frozen=True)
class Verdict:
    """The spread of own times over ranks (seconds), and who is slowest, by how much, in which phase."""

    fastest: float
    median: float
    slowest: float
    rank: int
    node: int
    phase: str
    excess: float
    marked: bool
    place: str = ""

    def facts(self) -> dict[str, Any]:
        """The fields of the event that names it."""
        seconds = {"own_seconds": self.slowest, "median_seconds": self.median}
        return {"rank": self.rank, "node": self.node, "phase": self.phase, **seconds}

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on node {self.node} holds the others back: {1e3 * self.slowest:.1f} ms of its "
            f"own in a step, the median rank {1e3 * self.median:.1f} ms; "
            f"{f'most of it at {self.place}' if self.place else f'the difference is in {self.phase}'}"
        )


def judge(ranks: Sequence[RankTimes], mark_ratio: float = MARK_RATIO) -> Verdict:
    """Name the slowest of at least one rank.

    `marked` is a rank whose quick steps take `mark_ratio` times the median rank's, or more, and its
    typical ones at least half as much more: noise of a busy host adds to every rank's typical steps, and
    hides in the quick ones of none. The median is the lower of two middle ranks: of two ranks the slower
    is compared with the faster.
    """
    middle = median_low(each.own for each in ranks)
    quick = median_low(each.quick for each in ranks)
    slow = max(ranks, key=lambda each: each.quick)
    marked = 0 < quick * mark_ratio <= slow.quick and slow.own >= middle * (1 + mark_ratio) / 2
    if not marked:
        slow = max(ranks, key=lambda each: each.own)
    excess = {name: slow.phase(name) - median_low(each.phase(name) for each in ranks) for name in PHASES}
    return Verdict(
        fastest=min(each.own for each in ranks),
        median=middle,
        slowest=slow.own,
        rank=slow.rank,
        node=slow.node,
        phase=max(excess, key=lambda name: excess[name]),
        excess=slow.own - middle,
        marked=marked,
    )


def samples_of(ranks: Sequence[RankTimes], verdict: Verdict) -> list[Sample]:
    """The metrics of an interval; series per rank up to MAX_RANK_SERIES ranks."""
    samples = [
        metrics.RANK_COMPUTE_SECONDS_MIN.set(verdict.fastest),
        metrics.RANK_COMPUTE_SECONDS_MEDIAN.set(verdict.median),
        metrics.RANK_COMPUTE_SECONDS_MAX.set(verdict.slowest),
        metrics.SLOWEST_RANK.set(verdict.rank),
        metrics.STRAGGLER_EXCESS_SECONDS.clear(),
    ]
    if len(ranks) <= MAX_RANK_SERIES:
        samples += [metrics.RANK_COMPUTE_SECONDS.clear(), metrics.RANK_DATA_SECONDS.clear()]
        for each in ranks:
            samples.append(metrics.RANK_COMPUTE_SECONDS.set(each.own, rank=each.rank, node=each.node))
            samples.append(metrics.RANK_DATA_SECONDS.set(each.data, rank=each.rank, node=each.node))
    if verdict.marked:
        where = {"rank": verdict.rank, "node": verdict.node, "phase": verdict.phase}
        samples.append(metrics.STRAGGLER_EXCESS_SECONDS.set(verdict.excess, **where))
    return samples


def rows_for_page(ranks: Sequence[RankTimes], verdict: Verdict) -> Ranks:
    """For the live page: milliseconds by phase, the slowest ranks where there are too many."""
    shown = sorted(sorted(ranks, key=lambda each: -each.own)[:MAX_RANK_SERIES], key=lambda each: each.rank)
    rows = [
        {
            "rank": each.rank,
            "node": each.node,
            "own_ms": round(1e3 * each.own, 3),
            "phases_ms": {name: round(1e3 * each.phase(name), 3) for name in PHASES},
            "straggler": verdict.marked and each.rank == verdict.rank,
        }
        for each in shown
    ]
    return Ranks(rows, str(verdict) if verdict.marked else None)


class Stragglers:
    """This rank's steps since the last interval, and the rows of all ranks while they are on their way."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._times: deque[StepTimes] = deque(maxlen=MAX_TIMES)
        self._gathering: Gathering | None = None

    def took(self, times: Sequence[StepTimes]) -> None:
        """Where the time of some steps went."""
        self._times += times

    def gather(self, exchange: Callable[[list[float]], Gathering]) -> list[RankTimes]:
        """Begin to gather every rank's row, which nobody waits for here; what the gathering before gave."""
        before = self.arrived(wait=True)
        self._gathering = exchange(row_of(self._node, self._times))
        self._times.clear()
        return before

    def arrived(self, wait: bool = False) -> list[RankTimes]:
        """All ranks, once their rows are here and one had steps to tell of; nothing before, and again."""
        if self._gathering is None or not (wait or self._gathering.is_here()):
            return []
        ranks, self._gathering = from_rows(self._gathering.rows()), None
        return ranks if any(each.own for each in ranks) else []


@dataclass(frozen=True)
class Report:
    """What rank 0 says of an interval's rows: metrics, the page's rows, and a name when it is news."""

    samples: list[Sample]
    page: Ranks
    news: Verdict | None


class StragglerWatch:
    """Tells news only: a rank that is marked twice in a row, and its end after two rows without it."""

    def __init__(self) -> None:
        self.named: Verdict | None = None
        self._before: int | None = None

    def report(self, ranks: Sequence[RankTimes]) -> Report:
        """What is to be said of one more interval."""
        verdict = judge(ranks)
        return Report(samples_of(ranks, verdict), rows_for_page(ranks, verdict), self.news(verdict))

    def news(self, verdict: Verdict) -> Verdict | None:
        """The verdict when it names somebody new; `named` is who holds the others back now, if anybody."""
        rank = verdict.rank if verdict.marked else None
        twice, self._before = rank == self._before, rank
        if not twice:
            return None
        known = self.named.rank if self.named is not None else None
        self.named = verdict if verdict.marked else None
        return verdict if rank is not None and rank != known else None
