"""Account for the wall time of a run over all its launches, in goodput.jsonl.

Node 0's agent keeps one line per period: a generation of ranks with the time before it. A period is charged
to one activity at a time, so its seconds add up to its length. Which steps were repeated follows from the
steps at which the later periods begin.
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from tandem.bounded_reader import RunFiles
from tandem.telemetry.journal import write_bytes_atomic
from tandem.telemetry.meter import ACTIVITIES, ActivityClock
from tandem.telemetry.metrics import (
    RESTART_COST_SECONDS,
    RUN_SECONDS,
    STEP_DURATION_SECONDS,
    STEP_PHASE_SECONDS,
    STRAGGLER_EXCESS_SECONDS,
    Sample,
)

PARTS = (
    "steps", "redone", "data", "stragglers", "evaluation", "save", "start", "rendezvous", "resume", "end",
    "away",
)  # fmt: skip
"""The parts of the wall time, which add up to it.

`steps` count for the result; `redone` ones were repeated or cut short. `data` and `stragglers` are rank 0's
waits inside steps. `away` is the time without a launch.
"""
PART_OF = {
    "startup": "start",
    "rendezvous": "rendezvous",
    "resume": "resume",
    "eval": "evaluation",
    "checkpoint": "save",
    "drain": "end",
}
STOPPED = "stop"
FAILED = "failure"
FINISHED = "finished"
KILLED = "launch killed"
"""Causes of the end of a launch. A launch that was killed could not write its own."""
CAUSE_OF_STATE = {"succeeded": FINISHED, "stopped": STOPPED, "failed": FAILED}
OTHER = "other"
RANK_KILLED = "rank killed"
IN_TEXT = {
    "was killed": RANK_KILLED,
    " hung": "hang",
    "out of memory": "out of memory",
    "lost their connections": "connections lost",
    " lost": "node lost",
    "joined": "node joined",
}
"""Words of the event `recovered`, with the causes that they represent; the first match counts."""
AGAIN = ("startup", "rendezvous", "resume")
"""The activities that a restart repeats."""
LINE_BYTES = 512
"""A line is padded to this length, so that a newer version of it fits in its place."""
MOST_LINES = 4000


@dataclass(frozen=True)
class Period:
    """One generation of ranks, from the end of the previous one.

    `launch` identifies the launch and `began` is the start of the period, both in Unix seconds. `seconds` is
    the wall time by ACTIVITIES. `first` is the step from which the ranks trained, None for a script or before
    the first step; `last` is the last finished step. `stalled`: seconds of training without a finished step
    at the end. `data` and `stragglers`: seconds of rank 0's waits. `end`: the cause of the end, or empty.
    """

    launch: float
    began: float
    seconds: Mapping[str, float] = field(default_factory=dict)
    first: int | None = None
    last: int = 0
    stalled: float = 0.0
    data: float = 0.0
    stragglers: float = 0.0
    end: str = ""

    @classmethod
    def parse(cls, record: Mapping[str, Any]) -> "Period | None":
        """Return the period of a line of goodput.jsonl, or None if the line is not one."""
        try:
            seconds = {each: max(0.0, float(record["seconds"].get(each, 0.0))) for each in ACTIVITIES}
            first = record.get("first")
            return cls(
                launch=float(record["launch"]),
                began=float(record["began"]),
                seconds=seconds,
                first=None if first is None else int(first),
                last=int(record.get("last", 0)),
                stalled=max(0.0, float(record.get("stalled", 0.0))),
                data=max(0.0, float(record.get("data", 0.0))),
                stragglers=max(0.0, float(record.get("stragglers", 0.0))),
                end=str(record.get("end", ""))[:40],
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return None

    @property
    def length(self) -> float:
        """The wall time in seconds."""
        return sum(self.seconds.values())


class Cost(NamedTuple):
    """The cost of a cause: how often it occurred, and the seconds of redone steps, restarts and absence."""

    times: int
    seconds: float


@dataclass(frozen=True)
class Ledger:
    """The wall time of a run in seconds, by PARTS, which add up to `wall`, and the cost of each cause.

    A cause's cost is not an extra part: it consists of parts that the cause explains.
    """

    parts: Mapping[str, float]
    causes: Mapping[str, Cost]

    @property
    def wall(self) -> float:
        return sum(self.parts.values())

    def samples(self) -> list[Sample]:
        parts = [RUN_SECONDS.set(seconds, part=part) for part, seconds in self.parts.items()]
        costs = [RESTART_COST_SECONDS.set(cost.seconds, cause=name) for name, cost in self.causes.items()]
        return parts + costs


def account(periods: Sequence[Period]) -> Ledger:
    """Return the ledger of these periods, which are in order of time."""
    parts = dict.fromkeys(PARTS, 0.0)
    costs: dict[str, list[float]] = {}
    survivors = _first_steps_after(periods)
    for at, period in enumerate(periods):
        for activity, part in PART_OF.items():
            parts[part] += period.seconds.get(activity, 0.0)
        training = period.seconds.get("train", 0.0)
        # Waits are measured by rank 0, and activities by the agent, so the sums could differ.
        waits = {"data": min(period.data, training)}
        waits["stragglers"] = min(period.stragglers, training - waits["data"])
        training = max(0.0, training - sum(waits.values()))  # rounding may leave less than nothing
        is_last = at == len(periods) - 1
        following = None if is_last else periods[at + 1]
        is_same_launch = following is not None and following.launch == period.launch
        # A launch that was killed could not write a cause.
        cause = period.end or (OTHER if is_same_launch else KILLED)
        # Without an end, the last period may still run, so nothing has been repeated yet.
        redone = 0.0 if is_last and not period.end else _redone(period, training, survivors[at])
        cost = redone
        if following is not None:
            away = 0.0 if is_same_launch else max(0.0, following.began - period.began - period.length)
            unseen = _unseen(period, training, survivors[at])
            unwritten = min(away, max(0.0, unseen - min(period.stalled, training)))
            training += unwritten
            away -= unwritten
            parts["away"] += away
            cost += away + sum(following.seconds.get(each, 0.0) for each in AGAIN)
        parts["steps"] += training - redone
        parts["redone"] += redone
        for part, seconds in waits.items():
            parts[part] += seconds
        if cause != FINISHED and (cost or following is not None):
            costs.setdefault(cause, []).append(cost)
    causes = {cause: Cost(len(each), sum(each)) for cause, each in costs.items()}
    return Ledger(parts, dict(sorted(causes.items(), key=lambda item: -item[1].seconds)))


def cause_of(kind: str, fields: Mapping[str, object]) -> str | None:
    """Return the cause in an event about a restart, or None for other events."""
    if kind == "rank_killed":
        return RANK_KILLED
    if kind != "recovered":
        return None
    return cause_in(str(fields.get("cause", ""))) or OTHER


def cause_in(text: str) -> str | None:
    """Return the cause that the text of a reason mentions, if any."""
    return next((cause for words, cause in IN_TEXT.items() if words in text), None)


def _first_steps_after(periods: Sequence[Period]) -> list[int | None]:
    """Return, for each period, the earliest step from which a later one trained; None without one."""
    found: list[int | None] = []
    earliest: int | None = None
    for period in reversed(periods):
        found.append(earliest)
        if period.first is not None:
            earliest = period.first if earliest is None else min(earliest, period.first)
    return found[::-1]


def _redone(period: Period, training: float, survivor: int | None) -> float:
    """Return how many of a period's seconds of training do not count, because later periods repeat them."""
    cut_short = period.end != FINISHED
    stalled = min(period.stalled, training) if cut_short else 0.0
    if period.first is None:
        return stalled
    steps = period.last - period.first
    if steps <= 0:
        return training if cut_short else 0.0
    kept = period.last if survivor is None else max(period.first, min(period.last, survivor))
    lost = max(0.0, stalled - _unseen(period, training, survivor))
    return min(training, lost + (training - stalled) * (period.last - kept) / steps)


def _unseen(period: Period, training: float, survivor: int | None) -> float:
    """Return the seconds of steps that count but were not reported to the agent before the ranks ended.

    A later period continues after these steps. Their time is part of `stalled`. If the launch was killed, the
    rest of it, from its last write to the kill, is in the time without a launch.
    """
    if survivor is None or period.first is None or period.last <= period.first:
        return 0.0
    per_step = (training - min(period.stalled, training)) / (period.last - period.first)
    return max(0, survivor - period.last) * per_step


def periods_in(records: Iterable[Mapping[str, Any]]) -> list[Period]:
    """Return the periods of the lines of goodput.jsonl."""
    return [period for record in records if (period := Period.parse(record)) is not None]


class LedgerFile:
    """Keeps the periods of this launch, and writes them to goodput.jsonl. Thread-safe.

    Methods take times of a monotonic clock, in seconds. Only `write` touches the file: the volume may hang.
    """

    def __init__(self, path: Path, launch: float, now: float) -> None:
        """`launch`: when this launch began, in Unix seconds; `now`: the same moment of the other clock."""
        self._path = path
        self._lock = threading.Lock()
        self._periods = [Period(launch, launch)]
        self._clock = ActivityClock(now)
        self._stepped = now  # when the last step was finished
        self._first_steps: tuple[int, float] | None = None  # the first report of a period: steps, seconds
        self._is_start_known = False
        self.due = threading.Event()
        """Set when the file should be written soon: a launch that is killed leaves only what was written."""
        self._excess = 0.0  # what a straggler costs a step
        self._writing = threading.Lock()
        self._base: int | None = None  # position of this launch's first line in the file
        self._earlier: list[Period] = []  # of the launches before this one, from the file
        self._written: list[bytes] = []

    def enter(self, activity: str, now: float) -> None:
        """Charge time from `now` on to this activity."""
        with self._lock:
            self._charge(now)
            if activity == "train" != self._clock.activity:
                self._stepped = now
            self._clock.activity = activity

    def begins(self, step: int, now: float) -> None:
        """Record that ranks train from this step."""
        with self._lock:
            self._change(first=step, last=step)
            self._stepped = now
            self._first_steps, self._is_start_known = None, False

    def finished(self, step: int, now: float) -> None:
        with self._lock:
            if (steps := step - self._periods[-1].last) > 0:
                self._charge(now)
                self._take_out_slow_start(steps, now - self._stepped)
                self._change(last=step, stalled=0.0)
                self._stepped = now

    def observe(self, samples: Iterable[Sample]) -> None:
        """Add rank 0's waits for data and for a straggler, from its samples of a log interval."""
        with self._lock:
            period = self._periods[-1]
            data = period.data
            waited = period.stragglers
            for name, labels, value in samples:
                if name == STEP_PHASE_SECONDS.name and labels.get("phase") == "data":
                    data += _number(value)
                elif name == STRAGGLER_EXCESS_SECONDS.name:
                    # Rank 0's own wait for data already counts as such.
                    is_own = labels.get("phase") == "data" and str(labels.get("rank")) == "0"
                    self._excess = 0.0 if is_own else _number(value)
                elif name == STEP_DURATION_SECONDS.name and isinstance(value, Sequence):
                    waited += self._excess * len(value)
            self._change(data=data, stragglers=waited)

    def ended(self, now: float) -> None:
        """End a generation; the next period begins."""
        with self._lock:
            self._charge(now)
            period = self._periods[-1]
            self._periods.append(Period(period.launch, period.began + period.length))
            self._clock.activity = "rendezvous"
            self._first_steps, self._is_start_known = None, False

    def set_cause(self, cause: str) -> None:
        """Record why the last generation ended."""
        with self._lock:
            if len(self._periods) > 1:
                self._periods[-2] = replace(self._periods[-2], end=cause)

    def closed(self, cause: str, now: float) -> None:
        """Record how the launch ends. Time until the process ends is still charged."""
        with self._lock:
            self._charge(now)
            self._change(end=cause)

    def periods(self, now: float) -> list[Period]:
        """Return the periods of this launch so far."""
        with self._lock:
            self._charge(now)
            return list(self._periods)

    def total(self, now: float) -> Ledger:
        """Return the ledger: of all launches after the first `write`, before that of this launch."""
        return account([*self._earlier, *self.periods(now)])

    def write(self, now: float) -> None:
        """Write the lines that have changed. Raises OSError."""
        with self._writing:
            lines = [_line(period) for period in self.periods(now)]
            if self._base is None:
                self._base = _end_of_whole_lines(self._path)
                self._earlier = periods_in(RunFiles(self._path.parent).lines(self._path.name))
            with open(self._path, "r+b" if self._path.exists() else "w+b", buffering=0) as file:
                for number, line in enumerate(lines):
                    if self._written[number : number + 1] != [line]:
                        file.seek(self._base + number * LINE_BYTES)
                        file.write(line)
            self._written = lines

    def _charge(self, now: float) -> None:
        period = self._periods[-1]
        activity = self._clock.activity
        seconds = dict(period.seconds)
        seconds[activity] = seconds.get(activity, 0.0) + self._clock.charge(now)
        stalled = max(0.0, self._clock.since - self._stepped) if activity == "train" else period.stalled
        self._change(seconds=seconds, stalled=stalled)

    def _take_out_slow_start(self, steps: int, seconds: float) -> None:
        """Count the extra time of the first steps, compared with the next ones, as startup time."""
        if self._is_start_known:
            return
        if self._first_steps is None:
            self._first_steps = (steps, seconds)
            return
        self._is_start_known = True
        self.due.set()
        first, taken = self._first_steps
        spent = dict(self._periods[-1].seconds)
        excess = min(max(0.0, taken - first * seconds / steps), spent.get("train", 0.0))
        if excess and self._periods[-1].first is not None:
            spent["train"] -= excess
            spent["resume"] = spent.get("resume", 0.0) + excess
            self._change(seconds=spent)

    def _change(self, **values: Any) -> None:
        self._periods[-1] = replace(self._periods[-1], **values)


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _line(period: Period) -> bytes:
    record = asdict(period)
    record["seconds"] = {name: round(each, 3) for name, each in period.seconds.items() if each}
    for name in ("launch", "began", "stalled", "data", "stragglers"):
        record[name] = round(record[name], 3)
    return json.dumps(record).encode().ljust(LINE_BYTES - 1) + b"\n"


def _end_of_whole_lines(path: Path) -> int:
    """Return where the next line begins. Drops an incomplete line, and the older half of a full file."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return 0
    lines = [line + b"\n" for line in content.split(b"\n")[:-1] if len(line) == LINE_BYTES - 1]
    if len(lines) >= MOST_LINES:
        lines = lines[-MOST_LINES // 2 :]
    whole = b"".join(lines)
    if whole != content:
        write_bytes_atomic(path, whole)
    return len(whole)
