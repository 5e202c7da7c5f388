"""Compute measurements of a rank's steps from given numbers; no clock is read here.

`Meter` splits steps into phases that add up to the step. All durations are in seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
TIMES = (*PHASES, "wait")
"""The parts of a step that a clock measures: the phases, and the wait at the end of backward."""
ACTIVITIES = ("startup", "rendezvous", "resume", "train", "eval", "checkpoint", "drain")


class ActivityClock:
    """Charges wall time to exactly one activity at a time; `now` is any clock in seconds.

    If the clock goes back, it counts as having stopped.
    """

    def __init__(self, now: float) -> None:
        self.activity = ACTIVITIES[0]
        self.since = now

    def charge(self, now: float) -> float:
        """Return the seconds since the last call, which belong to `activity`."""
        spent = max(0.0, now - self.since)
        self.since = max(now, self.since)
        return spent


WARMUP_STEPS = 20


@dataclass(slots=True)  # one per step; not frozen, because creating a frozen one takes five times as long
class StepTimes:
    """Durations of one step on one rank.

    The phases are its own time. `wait` is the wait for other ranks at the end of backward. `waits` are those
    inside the phases, in collectives, by phase; unknown on GPUs.
    """

    data: float
    transfer: float
    forward: float
    backward: float
    optimizer: float
    other: float
    wait: float
    waits: Mapping[str, float] = field(default_factory=dict)

    @property
    def own(self) -> float:
        """The whole step without the waits."""
        return self.data + self.transfer + self.forward + self.backward + self.optimizer + self.other

    @property
    def total(self) -> float:
        return self.own + self.wait + sum(self.waits.values())

    def phases(self) -> dict[str, float]:
        """Return seconds by PHASES with their waits, which add up to `total`."""
        seconds = {name: getattr(self, name) + self.waits.get(name, 0.0) for name in PHASES}
        seconds["backward"] += self.wait
        return seconds


@dataclass(frozen=True)
class Plan:
    """The plan of a run: samples of all ranks per step, steps per epoch, and total steps."""

    batch_size: int
    steps_per_epoch: int = 1
    steps_planned: int = 1


@dataclass(frozen=True)
class Costs:
    """FLOPs per sample, FLOP/s of one device, number of devices, and gradient bytes of one rank.

    0 means unknown. `sums`: the names of the values that the task's loss returns besides the loss; None:
    unknown.
    """

    flops_per_sample: float = 0.0
    device_flops: float = 0.0
    devices: int = 0
    sync_bytes: int = 0
    sums: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """State of torch's allocator on one GPU: current and peak bytes; counts since the process began."""

    gpu: int
    allocated: int
    reserved: int
    peak: int
    retries: int
    ooms: int


@dataclass(frozen=True)
class Consensus:
    """The values that all ranks know after a step.

    `loss` is NaN if it is not finite on some rank. `is_skipped`: the step changed nothing, because that loss
    or the reduced gradients are not finite. `sums`: the task's {name: (sum, count)}, over all ranks.
    """

    step: int
    loss: float
    stop: bool
    is_skipped: bool
    decisions: int
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Readings:
    """Values that stay on the device until a log line is due; counts are since the last readings."""

    grad_norm: float | None
    loss_scale: float | None
    clips: int
    hidden_sync_seconds: float
    memory: DeviceMemory | None


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save: seconds from its start to its last fsync, and how long training was blocked.

    `bytes` on the volume; None if the save failed.
    """

    step: int
    seconds: float
    held_seconds: float
    bytes: int | None


@dataclass
class Interval:
    """A number of steps, the samples of all ranks in them, and seconds by PHASES."""

    steps: int = 0
    samples: int = 0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    def add(self, samples: int, times: StepTimes) -> None:
        self.steps += 1
        self.samples += samples
        for phase, seconds in times.phases().items():
            self.phases[phase] += seconds

    def __add__(self, other: "Interval") -> "Interval":
        phases = {name: self.phases[name] + other.phases[name] for name in PHASES}
        return Interval(self.steps + other.steps, self.samples + other.samples, phases)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True)
class LogLine:
    """Measurements of the steps between two log lines; `step` is the last one.

    `loss` and `scores` (other values that the task's loss returns) are means over the steps; `rate` is the
    last step's.
    """

    step: int
    loss: float
    rate: float
    scores: Mapping[str, float]
    interval: Interval
    readings: Readings

    def numbers(self) -> dict[str, float]:
        """Return the values other than scores, without an unknown gradient norm."""
        norm = self.readings.grad_norm
        return {
            "loss": self.loss,
            "learning_rate": self.rate,
            "samples_per_second": self.interval.samples_per_second,
        } | ({} if norm is None else {"grad_norm": norm})

    def record(self) -> dict[str, Any]:
        """Return the line of metrics.jsonl, which is also a point of the page's curves."""
        scores = {"scores": self.scores} if self.scores else {}
        return self.numbers() | scores | {"phases": self.interval.phases}


class Meter:
    """Phases and throughput of one rank's steps."""

    def __init__(self) -> None:
        self._closed = Interval()
        self._open = Interval()
        self._warmup = Interval()

    def step(self, samples: int, times: StepTimes) -> None:
        """Record a finished step: `samples` of all ranks, and where its time was spent."""
        self._open.add(samples, times)
        if self._warmup.steps < WARMUP_STEPS:
            self._warmup.add(samples, times)

    def interval(self) -> Interval:
        """Return the steps since the last call; an unfinished step belongs to the next interval."""
        closed = self._open
        self._open = Interval()
        self._closed += closed
        return closed

    @property
    def total(self) -> Interval:
        """All steps so far."""
        return self._closed + self._open

    @property
    def samples_per_second(self) -> float:
        """Throughput of this launch in steps only (no evaluations or saves), without the first 20.

        A launch of 20 steps or fewer counts all of its steps. 0.0 before the first step.
        """
        # The first steps compile and allocate, so they do not show the speed of the others.
        total = self.total
        warmup = self._warmup
        if total.steps <= WARMUP_STEPS:
            return total.samples_per_second
        seconds = total.seconds - warmup.seconds
        return (total.samples - warmup.samples) / seconds if seconds > 0 else 0.0


class Means:
    """Means over the steps of a log interval: the loss, and the task's sums divided by their counts."""

    def __init__(self) -> None:
        self._loss_sum = 0.0
        self._loss_count = 0
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, consensus: Consensus) -> None:
        """Add one more step, unless its loss is not finite."""
        # A single NaN would make the mean of the whole interval NaN.
        if not math.isfinite(consensus.loss):
            return
        self._loss_sum += consensus.loss
        self._loss_count += 1
        self.add_sums(consensus.sums)

    def add_sums(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """Add {name: (sum, count)} of all ranks."""
        for name, (total, count) in sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + count)

    @property
    def loss(self) -> float:
        """The mean loss; NaN without a step."""
        return self._loss_sum / self._loss_count if self._loss_count else math.nan

    def close(self) -> tuple[float, dict[str, float]]:
        """Return (loss, means by name), and start a new interval."""
        loss = self.loss
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        self.load({})
        return loss, means

    def state(self) -> dict[str, Any]:
        """Return the state of the unfinished interval, for a checkpoint."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"loss_sum": self._loss_sum, "loss_count": self._loss_count, "sums": sums}

    def load(self, state: Mapping[str, Any]) -> None:
        self._loss_sum = state.get("loss_sum", 0.0)
        self._loss_count = int(state.get("loss_count", 0))
        self._sums = {name: (total, count) for name, (total, count) in state.get("sums", {}).items()}
