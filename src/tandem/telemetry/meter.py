"""What is measured of a rank's steps, from numbers given to it: no clock is read here.

`Meter` splits steps into phases that add up to the step. All durations are seconds.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
ACTIVITIES = ("startup", "rendezvous", "resume", "train", "eval", "checkpoint", "drain")
WARMUP_STEPS = 20


@dataclass(slots=True)  # one per step: not frozen, which would cost five times as much to make
class StepTimes:
    """Seconds of one step of one rank; `wait` is the part of backward spent waiting for other ranks."""

    data: float
    transfer: float
    forward: float
    backward: float
    optimizer: float
    other: float
    wait: float

    @property
    def own(self) -> float:
        """The whole step without the wait."""
        return self.data + self.transfer + self.forward + self.backward + self.optimizer + self.other

    @property
    def total(self) -> float:
        return self.own + self.wait

    def phases(self) -> dict[str, float]:
        """Seconds by name of PHASES, which add up to `total`: the wait is part of backward."""
        return {name: getattr(self, name) for name in PHASES} | {"backward": self.backward + self.wait}


@dataclass(frozen=True)
class Plan:
    """What a run is to be: samples of all ranks in a step, steps in an epoch and in all."""

    batch_size: int
    steps_per_epoch: int = 1
    steps_planned: int = 1


@dataclass(frozen=True)
class Costs:
    """FLOPs of a sample, FLOP/s that one device can do, how many devices, gradient bytes of one rank.

    0 means: not known. `sums`: the names of what the task's loss gives besides it; None: not known.
    """

    flops_per_sample: float = 0.0
    device_flops: float = 0.0
    devices: int = 0
    sync_bytes: int = 0
    sums: tuple[str, ...] | None = None


@dataclass(frozen=True)
class DeviceMemory:
    """What torch's allocator says of one GPU: bytes now and at most, and counts since the process began."""

    gpu: int
    allocated: int
    reserved: int
    peak: int
    retries: int
    ooms: int


@dataclass(frozen=True)
class Consensus:
    """What all ranks know after a step.

    `loss` is NaN when it is not finite on some rank; `left_out`: the step has changed nothing, because
    that loss or the reduced gradients are not finite. `sums`: the task's {name: (sum, count)}, of all ranks.
    """

    step: int
    loss: float
    stop: bool
    left_out: bool
    decisions: int
    sums: Mapping[str, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Readings:
    """Numbers that lie on the device until the log cadence is due; counts are since the last readings."""

    grad_norm: float | None
    loss_scale: float | None
    clips: int
    hidden_sync_seconds: float
    memory: DeviceMemory | None


@dataclass(frozen=True)
class SaveOutcome:
    """A save that ended: seconds from its begin to its last fsync, and how long training was held for it.

    `bytes` on the volume; None means that it failed.
    """

    step: int
    seconds: float
    held_seconds: float
    bytes: int | None


@dataclass
class Interval:
    """Some steps: how many, the samples of all ranks in them, and seconds by name of PHASES."""

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
    """What is known of the steps between two lines of the log, the last of which is `step`.

    `loss` and `scores` (what the task's loss gives besides) are means over them, `rate` is the last one's.
    """

    step: int
    loss: float
    rate: float
    scores: Mapping[str, float]
    interval: Interval
    readings: Readings

    def numbers(self) -> dict[str, float]:
        """Beside the scores; a norm that is not known stays away."""
        norm = self.readings.grad_norm
        return {
            "loss": self.loss,
            "learning_rate": self.rate,
            "samples_per_second": self.interval.samples_per_second,
        } | ({} if norm is None else {"grad_norm": norm})

    def record(self) -> dict[str, Any]:
        """The line of metrics.jsonl, and the point of the page's curves."""
        scores = {"scores": self.scores} if self.scores else {}
        return self.numbers() | scores | {"phases": self.interval.phases}


class Meter:
    """Phases and throughput of one rank's steps."""

    def __init__(self, warmup_steps: int = WARMUP_STEPS) -> None:
        self._closed, self._open, self._warmup = Interval(), Interval(), Interval()
        self._warmup_steps = warmup_steps

    def step(self, samples: int, times: StepTimes) -> None:
        """A step is over: `samples` of all ranks, and where its time went."""
        self._open.add(samples, times)
        if self._warmup.steps < self._warmup_steps:
            self._warmup.add(samples, times)

    def interval(self) -> Interval:
        """The steps since the last call; an open step goes to the next interval."""
        closed, self._open = self._open, Interval()
        self._closed += closed
        return closed

    @property
    def total(self) -> Interval:
        """All steps so far."""
        return self._closed + self._open

    @property
    def samples_per_second(self) -> float:
        """Throughput of this launch: steps only (no evaluation, no saves), without the first 20.

        A launch of 20 steps or fewer has nothing else, so there all of its steps count; 0.0 before the first.
        """
        total, warmup = self.total, self._warmup
        if total.steps <= self._warmup_steps:
            return total.samples_per_second
        seconds = total.seconds - warmup.seconds
        return (total.samples - warmup.samples) / seconds if seconds > 0 else 0.0


class Means:
    """Means over the steps of a log interval: the loss, and the task's sums over their counts."""

    def __init__(self) -> None:
        self._loss_sum, self._loss_count = 0.0, 0
        self._sums: dict[str, tuple[float, float]] = {}

    def add(self, consensus: Consensus) -> None:
        """One more step, unless its loss is not finite."""
        if not math.isfinite(consensus.loss):
            return
        self._loss_sum += consensus.loss
        self._loss_count += 1
        self.add_sums(consensus.sums)

    def add_sums(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """{name: (sum, count)} of all ranks."""
        for name, (total, count) in sums.items():
            before = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = (before[0] + total, before[1] + count)

    @property
    def loss(self) -> float:
        """NaN without a step."""
        return self._loss_sum / self._loss_count if self._loss_count else math.nan

    def close(self) -> tuple[float, dict[str, float]]:
        """(loss; means by name), and begin anew."""
        loss = self.loss
        means = {name: total / count for name, (total, count) in self._sums.items() if count}
        self.load({})
        return loss, means

    def state(self) -> dict[str, Any]:
        """The open interval, for a checkpoint."""
        sums = {name: list(pair) for name, pair in self._sums.items()}
        return {"loss_sum": self._loss_sum, "loss_count": self._loss_count, "sums": sums}

    def load(self, state: Mapping[str, Any]) -> None:
        self._loss_sum, self._loss_count = state.get("loss_sum", 0.0), int(state.get("loss_count", 0))
        self._sums = {name: (total, count) for name, (total, count) in state.get("sums", {}).items()}
