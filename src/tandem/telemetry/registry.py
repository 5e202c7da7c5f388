"""The values of all metrics: samples change them, and a page shows them.

Wrong or malicious samples do no harm: those that cannot be applied are only counted in
`tandem_collect_errors{source}`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import prometheus_client as prometheus
from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import choose_encoder, generate_latest

from tandem.telemetry.journal import write_bytes_atomic
from tandem.telemetry.metrics import (
    COLLECT_ERRORS,
    FAMILIES,
    FINAL_STATES,
    STATES,
    Counter,
    Family,
    Gauge,
    Histogram,
    Info,
    Sample,
    StateSet,
)

AnyMetric = prometheus.Counter | prometheus.Gauge | prometheus.Histogram | prometheus.Info | prometheus.Enum

MAX_SERIES = 64
MAX_LABEL_LENGTH = 200


class Registry:
    """The values of all families, for node `node`. Thread-safe; `apply` never raises."""

    def __init__(self, families: Iterable[Family] = FAMILIES, node: int = 0) -> None:
        # The client would otherwise add a `_created` series to each counter and histogram.
        disable_created_metrics()  # type: ignore[no-untyped-call,unused-ignore]
        self.registry = CollectorRegistry()
        self.state: str = STATES[0]
        self.training_started = False
        self.final_since: float | None = None  # time.monotonic() of the final state
        self.before_page: Callable[[], None] = lambda: None
        self._node = node
        # Reentrant, because `apply` counts errors while it holds the lock.
        self._lock = threading.RLock()
        self._families: dict[str, Family] = {}
        self._metrics: dict[str, AnyMetric] = {}
        self._registered: set[str] = set()
        self._series: dict[str, set[tuple[str, ...]]] = {}
        self._of_nodes: dict[tuple[str, tuple[str, ...]], float] = {}
        for family in families:
            self._declare(family)

    def _declare(self, family: Family) -> None:
        metric = self._metrics[family.name] = _create(family)
        self._families[family.name] = family
        self._series[family.name] = set()
        initial = family.initial if isinstance(family, Gauge) else None
        comes_later = isinstance(family, Gauge) or family.by_node or getattr(family, "late", False)
        if initial is not None or not comes_later:
            self._register(family.name)
        if isinstance(metric, prometheus.Gauge) and initial is not None:
            metric.set(initial)
        # Known series start at 0, because increase() misses the first increment of a new series.
        if isinstance(metric, prometheus.Counter) and len(family.labels) == 1:
            for label, values in family.labels.items():
                for value in values:
                    of_node = {"node": self._node} if family.by_node else {}
                    self._child(family, {label: value, **of_node})

    def apply(self, samples: Iterable[Sample]) -> None:
        """Apply the samples. An invalid one is counted as an error, and the others still apply."""
        with self._lock:
            for sample in samples:
                self._try(self._take, sample)

    def count_error(self, source: str) -> None:
        """Count a sample or message that could not be used."""
        with self._lock:
            child = self._child(COLLECT_ERRORS, {"source": source})
            assert isinstance(child, prometheus.Counter)
            child.inc()

    def node_samples(self) -> list[Sample]:
        """Return all values of families kept per node, for `apply_node` on node 0."""
        with self._lock:
            return [
                Sample(family.name, {k: v for k, v in sample.labels.items() if k != "node"}, sample.value)
                for family in self._families.values()
                if family.by_node and family.name in self._registered
                for collected in self._metrics[family.name].collect()
                for sample in collected.samples
            ]

    def by_node(self, family: Family, **labels: str) -> dict[int, float]:
        """Return {node: sum of its series} of a family that is kept per node; only series with `labels`."""
        found: dict[int, float] = {}
        with self._lock:
            (collected,) = self._metrics[family.name].collect()
            for sample in collected.samples:
                if labels.items() <= sample.labels.items():
                    node = int(sample.labels["node"])
                    found[node] = found.get(node, 0.0) + sample.value
        return found

    def value(self, family: Gauge) -> float | None:
        """Return the value of a gauge without labels, or None if it has never been set."""
        with self._lock:
            if family.name not in self._registered:
                return None
            (collected,) = self._metrics[family.name].collect()
            return float(collected.samples[0].value)

    def apply_node(self, node: int, samples: Iterable[Sample]) -> None:
        """Apply the result of `node_samples` of another node; its counters have that node's totals."""
        with self._lock:
            for sample in samples:
                self._try(self._take_of_node, node, sample)

    def forget_node(self, node: int) -> None:
        """Drop the gauges of a node that has left; its counters stay."""
        with self._lock:
            for name, family in self._families.items():
                metric = self._metrics[name]
                # A counter that vanished and returned would look like a reset to rate(), which would count
                # its total again.
                if family.by_node and isinstance(metric, prometheus.Gauge):
                    for key in [key for key in self._series[name] if key[-1] == str(node)]:
                        self._series[name].discard(key)
                        metric.remove(*key)

    def _try(self, take: Callable[..., None], *arguments: Any) -> None:
        try:
            take(*arguments)
        except _BadSampleError as bad:
            self.count_error(bad.source)
        # Conversions and the client raise these, for example for an integer that is too large for a float.
        except (TypeError, ValueError, OverflowError):
            self.count_error("value")

    def _take_of_node(self, node: int, sample: Sample) -> None:
        family, labels, value = self._read(sample)
        if not family.by_node:
            raise _BadSampleError("name")
        labels = {**labels, "node": node}
        if isinstance(family, Counter):
            key = (family.name, _key(family, labels))
            now = _number(value)
            before = self._of_nodes.get(key, 0.0)
            self._of_nodes[key] = now
            value = now - before if now >= before else now  # lower: that node's agent has restarted
        self._set_number(family, labels, value)

    def _take(self, sample: Sample) -> None:
        family, labels, value = self._read(sample)
        metric = self._metrics[family.name]
        if isinstance(metric, prometheus.Enum):
            self._set_state(metric, value)
        elif isinstance(metric, prometheus.Info):
            if not set(labels) <= set(family.labels):
                raise _BadSampleError("labels")
            metric.info({name: _text(labels.get(name, "")) for name in family.labels})
        elif value is None:
            self._clear(family)
        else:
            self._set_number(family, labels, value)

    def _read(self, sample: Sample) -> tuple[Family, Mapping[str, object], object]:
        if not isinstance(sample, list | tuple) or len(sample) != 3:
            raise _BadSampleError("message")
        name, labels, value = sample
        if not isinstance(name, str) or name not in self._families:
            raise _BadSampleError("name")
        if not isinstance(labels, Mapping):
            raise _BadSampleError("labels")
        return self._families[name], labels, value

    def _set_number(self, family: Family, labels: Mapping[str, object], value: object) -> None:
        values = [_number(one) for one in value] if isinstance(value, list | tuple) else [_number(value)]
        if not isinstance(family, Histogram) and len(values) != 1:
            raise _BadSampleError("value")
        # A gauge may be NaN or infinite (a loss often is), but a sum that includes such a value is broken
        # forever.
        if not isinstance(family, Gauge) and not all(math.isfinite(one) and one >= 0 for one in values):
            raise _BadSampleError("value")
        child = self._child(family, {"node": self._node, **labels} if family.by_node else labels)
        for one in values:
            if isinstance(child, prometheus.Gauge):
                child.set(one)
            elif isinstance(child, prometheus.Counter):
                child.inc(one)
            elif isinstance(child, prometheus.Histogram):
                child.observe(one)
        self._register(family.name)

    def _set_state(self, metric: prometheus.Enum, state: object) -> None:
        if not isinstance(state, str) or state not in STATES:
            raise _BadSampleError("state")
        metric.state(state)
        if state in FINAL_STATES:
            if self.state not in FINAL_STATES:
                self.final_since = time.monotonic()
        else:
            self.final_since = None
        self.state = state
        self.training_started = self.training_started or state == "training"

    def _child(self, family: Family, labels: Mapping[str, object]) -> AnyMetric:
        metric = self._metrics[family.name]
        series = self._series[family.name]
        key = _key(family, labels)
        if not key:
            return metric
        if key not in series:
            # A task may keep logging scores under new names. Each would take memory here and in Prometheus.
            if len(series) >= MAX_SERIES:
                raise _BadSampleError("series")
            series.add(key)
        return metric.labels(*key)

    def _clear(self, family: Family) -> None:
        metric = self._metrics[family.name]
        if not isinstance(metric, prometheus.Gauge) or not _label_names(family):
            raise _BadSampleError("value")
        metric.clear()
        self._series[family.name].clear()

    def _register(self, name: str) -> None:
        # Gauges are registered late: an unmeasured 0 would look like a measurement (a timestamp of 1970).
        if name not in self._registered:
            self._registered.add(name)
            self.registry.register(self._metrics[name])

    def _refresh(self) -> None:
        """Let the owner update values that change by themselves, such as times."""
        try:
            self.before_page()
        except Exception:  # a slightly outdated page is better than none
            self.count_error("refresh")

    def page(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return self.negotiate("")[0]

    def negotiate(self, accept: str) -> tuple[bytes, str]:
        """Return the page and its content type in the format that an HTTP Accept header asks for."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (ValueError, TypeError, IndexError):  # an invalid version in the header
            encoder, content_type = choose_encoder("")
        self._refresh()
        with self._lock:
            return encoder(self.registry), content_type

    def snapshot(self) -> list[dict[str, Any]]:
        """Return all series as plain JSON: name, help, kind and points of each family.

        A point is [labels, number]; a histogram's number is [bounds, counts, sum].
        """
        self._refresh()
        with self._lock:
            return [
                {"name": name, "help": family.help, "kind": family.kind, "points": _points(family, metric)}
                for name, family in self._families.items()
                if name in self._registered and (metric := self._metrics[name])
            ]

    def write_last_page(self, path: Path) -> None:
        """Write the page atomically (RUN_DIR/metrics.prom). Raises OSError."""
        self._refresh()
        with self._lock:
            content = generate_latest(self.registry)
        write_bytes_atomic(path, content)


class _BadSampleError(Exception):
    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


def _points(family: Family, metric: AnyMetric) -> list[list[Any]]:
    (collected,) = metric.collect()
    samples = collected.samples
    if not isinstance(family, Histogram):
        return [[dict(sample.labels), sample.value] for sample in samples]
    upto = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    total = next(sample.value for sample in samples if sample.name.endswith("_sum"))
    # The client's buckets include all lower ones.
    counts = [int(value - before) for value, before in zip(upto, [0.0, *upto], strict=False)]
    return [[{}, [list(family.buckets), counts, total]]]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadSampleError("value")
    return float(value)


def _text(value: object) -> str:
    """Return a valid label value: of limited length, and encodable (a directory's name may not be UTF-8)."""
    return str(value)[:MAX_LABEL_LENGTH].encode(errors="replace").decode()


def _label_names(family: Family) -> tuple[str, ...]:
    return (*family.labels, "node") if family.by_node else tuple(family.labels)


def _key(family: Family, labels: Mapping[str, object]) -> tuple[str, ...]:
    """Return the values of a family's labels in their order."""
    names = _label_names(family)
    if set(labels) != set(names):
        raise _BadSampleError("labels")
    key = tuple(_text(labels[name]) for name in names)
    for name, value in zip(names, key, strict=True):
        known = family.labels.get(name)
        if known and value not in known:
            raise _BadSampleError("labels")
    return key


def _create(family: Family) -> AnyMetric:
    """Create the client's object for a family, outside of any registry."""
    if isinstance(family, Histogram):
        return prometheus.Histogram(family.name, family.help, registry=None, buckets=family.buckets)
    if isinstance(family, Info):
        # The client appends the suffix itself.
        return prometheus.Info(family.name.removesuffix("_info"), family.help, registry=None)
    if isinstance(family, StateSet):
        return prometheus.Enum(family.name, family.help, registry=None, states=list(family.states))
    kind = prometheus.Counter if isinstance(family, Counter) else prometheus.Gauge
    return kind(family.name, family.help, _label_names(family), registry=None)
