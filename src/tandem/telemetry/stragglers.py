"""Who holds the others back: from one small row per rank, gathered at the log cadence, to a name.

In synchronous training all steps last equally long, because the fast wait for the slow in the gradient
all-reduce. What differs is a rank's own time: the step without that wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import median, median_low

from tandem.telemetry.meter import PHASES, StepTimes

MARK_RATIO = 1.2
"""A rank is marked when its quick steps take this many times the median rank's; see `judge`."""
MAX_RANK_SERIES = 64


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

    def __str__(self) -> str:
        return (
            f"rank {self.rank} on node {self.node} holds the others back: {1e3 * self.slowest:.1f} ms of its "
            f"own in a step, the median rank {1e3 * self.median:.1f} ms; the difference is in {self.phase}"
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


def rows_for_metrics(ranks: Sequence[RankTimes], verdict: Verdict) -> dict[str, object]:
    """The message for `Metrics.apply`; series per rank up to MAX_RANK_SERIES ranks."""
    where = {each.rank: {"rank": each.rank, "node": each.node} for each in ranks[:MAX_RANK_SERIES]}
    clear = ["tandem_straggler_excess_seconds"]
    rows: list[object] = [
        ["tandem_rank_compute_seconds_min", {}, verdict.fastest],
        ["tandem_rank_compute_seconds_median", {}, verdict.median],
        ["tandem_rank_compute_seconds_max", {}, verdict.slowest],
        ["tandem_slowest_rank", {}, verdict.rank],
    ]
    if len(ranks) <= MAX_RANK_SERIES:
        clear += ["tandem_rank_compute_seconds", "tandem_rank_data_seconds"]  # of a world that was larger
        rows += [["tandem_rank_compute_seconds", where[each.rank], each.own] for each in ranks]
        rows += [["tandem_rank_data_seconds", where[each.rank], each.data] for each in ranks]
    if verdict.marked:
        labels = {"rank": verdict.rank, "node": verdict.node, "phase": verdict.phase}
        rows.append(["tandem_straggler_excess_seconds", labels, verdict.excess])
    return {"clear": clear, "set": rows}


def rows_for_page(ranks: Sequence[RankTimes], verdict: Verdict) -> dict[str, object]:
    """The message for the live page: milliseconds by phase, the slowest ranks where there are too many."""
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
    return {"ranks": {"rows": rows, "says": str(verdict) if verdict.marked else None}}


class StragglerWatch:
    """Tells news only: a rank that is marked twice in a row, and its end after two rows without it."""

    def __init__(self) -> None:
        self.named: Verdict | None = None
        self._before: int | None = None

    def news(self, verdict: Verdict) -> Verdict | None:
        """The verdict when it names somebody new; `named` is who holds the others back now, if anybody."""
        rank = verdict.rank if verdict.marked else None
        twice, self._before = rank == self._before, rank
        if not twice:
            return None
        known = self.named.rank if self.named is not None else None
        self.named = verdict if verdict.marked else None
        return verdict if rank is not None and rank != known else None
