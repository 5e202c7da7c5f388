"""Where the time went, from numbers given to it: no clock is read here.

`Meter` splits steps into phases that add up to the step; `Activities` splits a launch into activities that
add up to wall time. All durations are seconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

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
class Agreed:
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


@dataclass(frozen=True)
class Interval:
    """The steps between two calls of `Meter.interval`; `phases`, all of PHASES, add up to `seconds`."""

    steps: int
    samples: int
    seconds: float
    phases: dict[str, float]

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def seconds_per_step(self) -> float:
        return self.seconds / self.steps if self.steps else 0.0


class Meter:
    """Phases and throughput of one rank's steps."""

    def __init__(self, warmup_steps: int = WARMUP_STEPS) -> None:
        self.steps = 0
        self.samples = 0
        self.seconds = 0.0
        self._warmup_steps = warmup_steps
        self._warmup_samples = 0
        self._warmup_seconds = 0.0
        self._closed_phases = dict.fromkeys(PHASES, 0.0)
        self._reset_interval()

    def _reset_interval(self) -> None:
        self._interval_steps = 0
        self._interval_samples = 0
        self._interval_phases = dict.fromkeys(PHASES, 0.0)

    def step(self, samples: int, times: StepTimes) -> None:
        """A step is over: `samples` of all ranks, and where its time went."""
        for phase, seconds in times.phases().items():
            self._interval_phases[phase] += seconds
        self._interval_steps += 1
        self._interval_samples += samples
        self.steps += 1
        self.samples += samples
        self.seconds += times.total
        if self.steps <= self._warmup_steps:
            self._warmup_samples += samples
            self._warmup_seconds += times.total

    def interval(self) -> Interval:
        """What happened since the last call, and begin anew; an open step goes to the next interval."""
        phases = self._interval_phases
        closed = Interval(self._interval_steps, self._interval_samples, sum(phases.values()), phases)
        self._closed_phases = self.phases
        self._reset_interval()
        return closed

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of all steps so far by name of PHASES; they add up to `seconds`."""
        return {name: self._closed_phases[name] + self._interval_phases[name] for name in PHASES}

    @property
    def samples_per_second(self) -> float:
        """Throughput of this launch: steps only (no evaluation, no saves), without the first 20.

        A launch of 20 steps or fewer has nothing else, so there all of its steps count; 0.0 before the first.
        """
        samples, seconds = self.samples, self.seconds
        if self.steps > self._warmup_steps:
            samples, seconds = samples - self._warmup_samples, seconds - self._warmup_seconds
        return samples / seconds if seconds > 0 else 0.0


class Activities:
    """What a launch spends its wall time on: exactly one activity at any moment.

    `now` is any clock in seconds; one that steps back counts as standing still.
    """

    def __init__(self, now: float, activity: str = "startup") -> None:
        self._totals = dict.fromkeys(ACTIVITIES, 0.0)
        self._taken = dict.fromkeys(ACTIVITIES, 0.0)
        self._since = now
        self.current = _known_activity(activity)

    def switch(self, activity: str, now: float) -> str:
        """Begin another activity; returns the one it replaces, to switch back to.

        Raises ValueError for a name not in ACTIVITIES.
        """
        previous, following = self.current, _known_activity(activity)
        self._advance(now)
        self.current = following
        return previous

    def totals(self, now: float) -> dict[str, float]:
        """Seconds since the start for every name of ACTIVITIES; they add up to the wall time until `now`."""
        self._advance(now)
        return dict(self._totals)

    def take(self, now: float) -> dict[str, float]:
        """Seconds per activity since the last `take`, for counters; activities without any are left out."""
        totals, before = self.totals(now), self._taken
        self._taken = totals
        return {name: totals[name] - before[name] for name in ACTIVITIES if totals[name] > before[name]}

    def _advance(self, now: float) -> None:
        if now > self._since:
            self._totals[self.current] += now - self._since
            self._since = now


def _known_activity(name: str) -> str:
    if name not in ACTIVITIES:
        raise ValueError(f"activity {name!r}: valid are {', '.join(ACTIVITIES)}")
    return name
