"""What a metric is: its declaration, and the samples that are made by it. No values are kept here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

Labels = Mapping[str, tuple[str, ...]]


class Sample(NamedTuple):
    """One change of one metric, as it travels: by how much a counter grows, what a gauge or state is now,
    what a histogram has seen. A gauge whose value is None forgets all its series."""

    name: str
    labels: dict[str, Any]
    value: float | str | Sequence[float] | None


@dataclass(frozen=True)
class Family:
    """One metric. `labels` maps a label to its values, () = any.

    With `by_node` every node's agent has a series of its own; the label `node` is the agent's to add.
    """

    kind: ClassVar[str]

    short: str
    help: str
    group: str
    labels: Labels = field(default_factory=dict)
    by_node: bool = False

    @property
    def name(self) -> str:
        return f"tandem_{self.short}"

    @property
    def wire_names(self) -> tuple[str, ...]:
        """Names of the series as PromQL sees them."""
        return (self.name,)


@dataclass(frozen=True)
class Counter(Family):
    """What only grows; `late`: absent until it is counted, for what not every run has."""

    kind = "counter"
    late: bool = False

    @property
    def wire_names(self) -> tuple[str, ...]:
        return (f"{self.name}_total",)

    def inc(self, amount: float = 1, /, **labels: object) -> Sample:
        return Sample(self.name, labels, amount)


@dataclass(frozen=True)
class Gauge(Family):
    """What is as it is now; `initial` None: absent until it is set."""

    kind = "gauge"
    initial: float | None = None

    def set(self, value: float, /, **labels: object) -> Sample:
        return Sample(self.name, labels, value)

    def clear(self) -> Sample:
        """Forget all series, such as ranks that are gone."""
        return Sample(self.name, {}, None)


@dataclass(frozen=True)
class Histogram(Family):
    """How often something took how long."""

    kind = "histogram"
    buckets: tuple[float, ...] = ()

    @property
    def wire_names(self) -> tuple[str, ...]:
        return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))

    def observe(self, *values: float) -> Sample:
        return Sample(self.name, {}, values)


@dataclass(frozen=True)
class Info(Family):
    """Facts as labels."""

    kind = "info"

    def says(self, **labels: object) -> Sample:
        return Sample(self.name, labels, 1)


@dataclass(frozen=True)
class StateSet(Family):
    """One of several states, which are the values of the one label."""

    kind = "state set"

    @property
    def states(self) -> tuple[str, ...]:
        return self.labels[self.name]

    def enter(self, state: str) -> Sample:
        return Sample(self.name, {}, state)


def labels(*free: str, **known: tuple[str, ...]) -> Labels:
    """Labels of any value, and labels with known values."""
    return dict.fromkeys(free, ()) | known
