"""Derive one sentence from a run's metrics: what limits the run, and what to try next. Pure.

The metrics page is the only input, so a live run, its summary and its report get the same sentence. A rank's
own time and data time, and the typical step, are medians of the last log interval. All other numbers count
from the start of the launch. If the numbers prove nothing, there is no sentence.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import NamedTuple

from tandem.schedule import Cadence
from tandem.telemetry import metrics
from tandem.telemetry.meter import ACTIVITIES, PHASES
from tandem.text import format_duration

FEWEST_STEPS = 50
SHORTEST_TRAINING_SECONDS = 5.0
"""In a shorter launch, imports, compilation and the first batches outweigh the training."""
SHORTEST_WAIT_SECONDS = 20.0
"""A start of a few seconds does not count as a wait for other nodes, however short the run."""
EVALUATION_SHARE = 0.2
SAVE_SHARE = 0.15
WAIT_SHARE = 0.2
DATA_SHARE = 0.2
EXCHANGE_SHARE = 0.3
TRANSFER_SHARE = 0.25
OPTIMIZER_SHARE = 0.4
"""Smaller shares are normal, or not worth a person's time."""
BUSY_GPU = 0.5
"""A GPU that runs kernels less than this share of the time waits for its host."""
GOAL_SHARE = 0.05
"""With a suggested interval, evaluations or saves take about this share."""
MOST_TIMES = 1000
"""A suggested interval is at most this many times the current one; beyond that, something else is wrong."""
SHORT_EXCHANGE_SECONDS = 0.02
SMALL_EXCHANGE_BYTES = 4 * 2**20
"""An exchange below both of these mostly waits for messages to arrive, so its size does not matter."""
STANDS_OUT = 2.0
"""A rank is named if its data time is this many times the median rank's."""
MOST_WORKERS = 8

_LINE = re.compile(r'(tandem_\w+)(?:\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\})? (\S+)')
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class RankLoad(NamedTuple):
    """A rank's own time and data time in a typical step, in seconds."""

    rank: int
    own: float
    data: float


class Straggler(NamedTuple):
    """The rank that slows the others, by `excess` seconds per step, in `phase`."""

    rank: int
    node: int
    phase: str
    excess: float


@dataclass(frozen=True)
class Measured:
    """Measurements of one launch, in seconds.

    `activities`: wall time by ACTIVITIES. `phases`: rank 0's step time by PHASES. `step`: a typical step,
    None if unknown, as in a script. `sync_bytes`: gradients of one step. `gpu`: mean utilization, None
    without a GPU. `settings`: by flat name.
    """

    activities: Mapping[str, float]
    steps: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict)
    step: float | None = None
    ranks: tuple[RankLoad, ...] = ()
    straggler: Straggler | None = None
    blocked: float = 0.0
    sync_bytes: float = 0.0
    gpu: float | None = None
    restarts: float = 0.0
    settings: Mapping[str, object] = field(default_factory=dict)


class _Limit(NamedTuple):
    """A limit of the run: which share of the wall time it takes, and the sentence."""

    share: float
    text: str


def measured(page: str, settings: Mapping[str, object]) -> Measured:
    """Parse a page of metrics in Prometheus' text format; invalid lines are ignored."""
    found = _series(page)

    def value(family: metrics.Family, **labels: str) -> float | None:
        return found.get(family.wire_names[0], {}).get(frozenset(labels.items()))

    def by_rank(family: metrics.Family) -> dict[int, float]:
        rows = ((dict(labels), seconds) for labels, seconds in found.get(family.name, {}).items())
        return {int(row["rank"]): seconds for row, seconds in rows if _is_number(row.get("rank", ""))}

    steps = found.get(f"{metrics.STEP_DURATION_SECONDS.name}_count", {}).get(frozenset(), 0.0)
    own = by_rank(metrics.RANK_COMPUTE_SECONDS)
    data = by_rank(metrics.RANK_DATA_SECONDS)
    gpus = list(found.get(metrics.GPU_UTILIZATION_RATIO.name, {}).values())
    sent = value(metrics.GRADIENT_SYNC_BYTES) or 0.0
    return Measured(
        activities={each: value(metrics.ACTIVITY_SECONDS, activity=each) or 0.0 for each in ACTIVITIES},
        steps=max(steps, value(metrics.STEPS) or 0.0),
        phases={each: value(metrics.STEP_PHASE_SECONDS, phase=each) or 0.0 for each in PHASES},
        step=value(metrics.TYPICAL_STEP_SECONDS),
        ranks=tuple(RankLoad(rank, own[rank], data.get(rank, 0.0)) for rank in sorted(own)),
        straggler=_straggler(found.get(metrics.STRAGGLER_EXCESS_SECONDS.name, {})),
        blocked=value(metrics.CHECKPOINT_BLOCKED_SECONDS) or 0.0,
        sync_bytes=sent / steps if steps else 0.0,
        gpu=sum(gpus) / len(gpus) if gpus else None,
        restarts=sum(found.get(metrics.RESTARTS.wire_names[0], {}).values()),
        settings=settings,
    )


def verdict(run: Measured) -> str | None:
    """Return what takes most of the training's time, and what to try; None if nothing does."""
    whole = sum(seconds for name, seconds in run.activities.items() if name != "startup")
    training = run.activities.get("train", 0.0)
    limits = [*_of_the_wall_time(run, whole)]
    if training >= SHORTEST_TRAINING_SECONDS and (run.steps >= FEWEST_STEPS or run.straggler is not None):
        limits += [_Limit(each.share * training / whole, each.text) for each in _of_a_step(run)]
    return max(limits, key=lambda each: each.share).text if limits else None


def _of_the_wall_time(run: Measured, whole: float) -> Iterable[_Limit]:
    """Yield the limits outside of steps. `whole` is the wall time in seconds."""
    spent = run.activities
    if spent.get("train", 0.0) >= SHORTEST_TRAINING_SECONDS:
        evaluation = spent.get("eval", 0.0) / whole
        if evaluation >= EVALUATION_SHARE:
            less = _less_often(run.settings.get("eval_every"), evaluation)
            text = f"evaluation: it takes {evaluation:.0%} of the time; evaluate less often"
            yield _Limit(evaluation, text + (f" (--eval-every {less})" if less else ""))
        saving = max(spent.get("checkpoint", 0.0), run.blocked) / whole
        if saving >= SAVE_SHARE:
            less = _less_often(run.settings.get("checkpoint_every"), saving)
            text = f"saves: training waits {saving:.0%} of the time for them"
            remedy = "use a faster volume, or save less often"
            yield _Limit(saving, f"{text}; {remedy}" + (f" (--checkpoint-every {less})" if less else ""))
    waiting = spent.get("rendezvous", 0.0) + spent.get("resume", 0.0)
    share = waiting / whole if whole else 0.0
    if waiting >= SHORTEST_WAIT_SECONDS and share >= WAIT_SHARE:
        if run.restarts:
            times = f"{run.restarts:.0f} {'restart' if run.restarts == 1 else 'restarts'}"
            why = f"restarts: {share:.0%} of the time went to {times}; the events show their causes"
        else:
            why = (
                f"nodes: {share:.0%} of the time was a wait for nodes to join and to resume; "
                "start them at the same time, and run `tandem doctor` on the one that was last"
            )
        yield _Limit(share, why)


def _of_a_step(run: Measured) -> Iterable[_Limit]:
    """Yield the limits of a step; shares are of the step's time."""
    slow = run.straggler
    step = run.step or (max(each.own for each in run.ranks) if slow is not None and run.ranks else None)
    if not step or step <= 0:
        return
    if slow is not None and slow.phase != "data":
        share = min(slow.excess / step, 1.0)
        what = f"its {slow.phase} takes" if slow.phase in PHASES[:-1] else "it takes"
        yield _Limit(
            share,
            f"slow rank: {share:.0%} of a step is waiting for rank {slow.rank} on node {slow.node}, "
            f"because {what} {format_duration(slow.excess)} longer than on the others; look at that node's "
            "load, clocks and temperature",
        )
    if run.step is None:
        return
    phase_shares = _phase_shares(run)
    yield from _data(run, step, phase_shares.get("data", 0.0))
    yield from _exchange(run, step)
    if (share := phase_shares.get("transfer", 0.0)) >= TRANSFER_SHARE:
        text = f"transfer: {share:.0%} of a step is copying batches to the device; send smaller samples"
        yield _Limit(share, f"{text}, such as uint8, and convert them in the loss")
    if (share := phase_shares.get("optimizer", 0.0)) >= OPTIMIZER_SHARE:
        yield _Limit(share, f"small batch: {share:.0%} of a step is the optimizer; try a larger --batch-size")
    own = max((each.own for each in run.ranks), default=step)
    host_is_slow = run.gpu is not None and run.gpu < BUSY_GPU and own / step > 1 - EXCHANGE_SHARE
    if host_is_slow and phase_shares.get("data", 0.0) < DATA_SHARE and run.gpu is not None:
        text = f"small batch: the GPU is idle {1 - run.gpu:.0%} of the time, because its work is too small"
        yield _Limit(1 - run.gpu, f"{text}; try a larger --batch-size, or --compile reduce-overhead")


def _phase_shares(run: Measured) -> dict[str, float]:
    """Return the share of each phase in rank 0's steps."""
    whole = sum(run.phases.values())
    return {name: seconds / whole for name, seconds in run.phases.items()} if whole > 0 else {}


def _data(run: Measured, step: float, of_rank_0: float) -> Iterable[_Limit]:
    """Yield that ranks wait for data.

    The median misses a loader that stalls occasionally; rank 0's sum does not.
    """
    slowest = max(run.ranks, key=lambda each: each.data, default=None)
    typical = min(slowest.data / step, 1.0) if slowest is not None else 0.0
    share = max(typical, of_rank_0)
    if share < DATA_SHARE:
        return
    others = [each.data for each in run.ranks if slowest is None or each.rank != slowest.rank]
    # A limit from rank 0's own sum names no rank, because only rank 0 reports it.
    stands_out = slowest is not None and typical >= of_rank_0 and bool(others)
    if stands_out and slowest is not None and slowest.data >= STANDS_OUT * max(median_low(others), 1e-9):
        whose = f"the loader of rank {slowest.rank}"
    else:
        whose = "the loaders" if len(run.ranks) > 1 else "the loader"
    yield _Limit(share, f"data: {share:.0%} of a step is waiting for {whose}; {_for_data(run.settings)}")


def _for_data(settings: Mapping[str, object]) -> str:
    """Return what to try for faster data; "auto" has already found that more workers would not help."""
    workers = settings.get("workers")
    if workers == "auto" or (isinstance(workers, int) and workers >= MOST_WORKERS):
        return "make reading or transforming a sample cheaper, or cache the samples"
    return f"try --workers {2 * workers if isinstance(workers, int) and workers else 2}"


def _exchange(run: Measured, step: float) -> Iterable[_Limit]:
    """Yield that the exchange of gradients limits the run: even the slowest rank waits that long."""
    waited = step - max((each.own for each in run.ranks), default=step)
    share = waited / step
    if len(run.ranks) < 2 or share < EXCHANGE_SHARE:
        return
    size = f" of {_size(run.sync_bytes)}" if run.sync_bytes else ""
    if waited < SHORT_EXCHANGE_SECONDS and run.sync_bytes < SMALL_EXCHANGE_BYTES:
        what = f"the exchange of gradients{size}"
        text = f"small batch: {share:.0%} of a step of {format_duration(step)} is {what}"
        yield _Limit(share, f"{text}; a larger --batch-size has fewer of them, and so do fewer ranks")
        return
    text = f"slow link: {share:.0%} of a step is the exchange of gradients{size}"
    # fsdp's exchanges cannot be compressed.
    is_fsdp = run.settings.get("strategy") == "fsdp"
    compresses = not is_fsdp and run.settings.get("gradient_compression") in (None, "none")
    remedy = ", or --gradient-compression bf16" if compresses else ""
    yield _Limit(share, f"{text}; try a larger --batch-size{remedy}, or a faster network")


def _size(count: float) -> str:
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= length:
            return f"{count / length:.3g} {unit}"
    return f"{count:.0f} bytes"


def _less_often(cadence: object, share: float) -> str:
    """Return a cadence that leaves GOAL_SHARE, as a user types it; "" if none can be named."""
    try:
        known = Cadence.parse(str(cadence))
    except ValueError:
        return ""
    if known.unit == "never" or share >= 1:
        return ""
    times = math.ceil(share / (1 - share) * (1 - GOAL_SHARE) / GOAL_SHARE)
    if times > MOST_TIMES:
        return ""
    value = f"{known.value * times:g}"
    if known.unit == "percent":
        return f"{value}%" if known.value * times <= 100 else ""
    return {"steps": f"{known.value * times:.0f}", "epochs": f"{value}epoch", "seconds": f"{value}s"}[
        known.unit
    ]


def _straggler(series: Mapping[frozenset[tuple[str, str]], float]) -> Straggler | None:
    for labels, excess in series.items():
        named = dict(labels)
        is_known = _is_number(named.get("rank", "")) and _is_number(named.get("node", ""))
        if is_known and named.get("phase") in PHASES:
            return Straggler(int(named["rank"]), int(named["node"]), named["phase"], excess)
    return None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,9}", text) is not None


def _series(page: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return {name: {labels: value}} of a page's finite, non-negative values."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for line in page.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            continue
        name, labels, text = match.groups()
        try:
            number = float(text)
        except ValueError:
            continue
        if math.isfinite(number) and number >= 0:
            found.setdefault(name, {})[frozenset(_LABEL.findall(labels or ""))] = number
    return found
