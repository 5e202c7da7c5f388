"""Kinds of metrics: their declarations, and the samples made from them. Values are not stored here."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

Labels = Mapping[str, tuple[str, ...]]


class Sample(NamedTuple):
    """One change of one metric, in the form in which it is sent.

    The value is the increment of a counter, the value of a gauge, the state of a state set, or the
    observations of a histogram. A gauge with the value None drops all its series.
    """

    name: str
    labels: dict[str, Any]
    value: float | str | Sequence[float] | None


@dataclass(frozen=True)
class Family:
    """One metric. `labels` maps a label to its possible values, () = any.

    With `by_node`, every node's agent has its own series; the agent adds the label `node`.
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
        """Names of the series in PromQL."""
        return (self.name,)


@dataclass(frozen=True)
class Counter(Family):
    """A metric that only grows; `late`: absent until first counted, for what not every run has."""

    kind = "counter"
    late: bool = False

    @property
    def wire_names(self) -> tuple[str, ...]:
        return (f"{self.name}_total",)

    # Positional only, so that a label may have any name.
    def inc(self, amount: float = 1, /, **labels: object) -> Sample:
        return Sample(self.name, labels, amount)


@dataclass(frozen=True)
class Gauge(Family):
    """A metric with a current value; `initial` None: absent until it is set."""

    kind = "gauge"
    initial: float | None = None

    def set(self, value: float, /, **labels: object) -> Sample:
        return Sample(self.name, labels, value)

    def clear(self) -> Sample:
        """Drop all series, for example of ranks that are gone."""
        return Sample(self.name, {}, None)


@dataclass(frozen=True)
class Histogram(Family):
    """A distribution of durations or sizes."""

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
    """One of several states, which are the values of its only label."""

    kind = "state set"

    @property
    def states(self) -> tuple[str, ...]:
        return self.labels[self.name]

    def enter(self, state: str) -> Sample:
        return Sample(self.name, {}, state)


def labels(*free: str, **known: tuple[str, ...]) -> Labels:
    """Combine labels of any value with labels of known values."""
    return dict.fromkeys(free, ()) | known
