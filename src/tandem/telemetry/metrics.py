"""The registry that holds the values of all families, and the messages that change them.

Ranks send messages (plain dicts that fit JSON); `Metrics.apply` turns them into series. A message can be
wrong or hostile without harm: what cannot be applied is counted in `tandem_collect_errors{source}`.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Enum,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder, generate_latest

from tandem.telemetry.families import FAMILIES, FINAL_STATES, STATES, Family
from tandem.telemetry.journal import write_bytes_atomic

AnyMetric = Counter | Gauge | Histogram | Info | Enum

MAX_SERIES = 64
MAX_LABEL_LENGTH = 200


class Metrics:
    """The values of all families in a registry of their own. Thread-safe; `apply` never raises."""

    def __init__(self, families: Iterable[Family] = FAMILIES) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call,unused-ignore]
        self.registry = CollectorRegistry()
        self.state: str = STATES[0]
        self.training_started = False
        self.final_since: float | None = None  # time.monotonic() of the final state
        self.before_page: Callable[[], None] = lambda: None
        self._lock = threading.RLock()
        self._families: dict[str, Family] = {}
        self._metrics: dict[str, AnyMetric] = {}
        self._registered: set[str] = set()
        self._series: dict[str, set[tuple[str, ...]]] = {}
        for family in families:
            self._declare(family)

    def _declare(self, family: Family) -> None:
        metric = self._metrics[family.name] = _create(family)
        self._families[family.name] = family
        self._series[family.name] = set()
        if family.initial is not None or (family.kind != "gauge" and family.group != "GPU"):
            self._register(family.name)
        if isinstance(metric, Gauge) and family.initial is not None:
            metric.set(family.initial)
        # Known series start at 0: increase() misses the first increment of a series born with it.
        if isinstance(metric, Counter) and len(family.labels) == 1:
            for label, values in family.labels.items():
                for value in values:
                    self._child(family.name, {label: value})

    def apply(self, message: Mapping[str, object] | object) -> None:
        """Apply {"set"|"inc"|"observe": [[name, labels, value]...], "info": [[name, labels]...],
        "clear": [name...], "state": one of STATES}; other keys are left alone. `observe` also takes a list
        of values. Names may carry `_total`. What is wrong is counted, the rest of the message still applies.
        """
        if not isinstance(message, Mapping):
            self.count_error("message")
            return
        with self._lock:
            for verb in ("clear", "info", "set", "inc", "observe"):
                rows = message.get(verb, ())
                if not isinstance(rows, list | tuple):
                    self.count_error("message")
                    continue
                for row in rows:
                    self._try_row(verb, row)
            if "state" in message:
                self._set_state(message["state"])

    def count_error(self, source: str) -> None:
        """Count one sample that could not be used."""
        with self._lock:
            child = self._child("tandem_collect_errors", {"source": source})
            assert isinstance(child, Counter)
            child.inc()

    def _try_row(self, verb: str, row: object) -> None:
        try:
            self._row(verb, row)
        except _BadSample as bad:
            self.count_error(bad.source)
        except (TypeError, ValueError, OverflowError):
            self.count_error("value")

    def _row(self, verb: str, row: object) -> None:
        if verb == "clear":
            self._clear(self._name(row))
            return
        if not isinstance(row, list | tuple) or len(row) != (2 if verb == "info" else 3):
            raise _BadSample("message")
        name, labels = self._name(row[0]), row[1]
        if labels is None:
            labels = {}
        if not isinstance(labels, Mapping):
            raise _BadSample("labels")
        kind = self._families[name].kind
        if kind != {"info": "info", "set": "gauge", "inc": "counter", "observe": "histogram"}[verb]:
            raise _BadSample("kind")
        if kind == "info":
            self._set_info(name, labels)
        else:
            self._set_number(name, labels, row[2])

    def _name(self, name: object) -> str:
        if isinstance(name, str):
            for known in (name, name.removesuffix("_total"), f"{name}_info"):
                if known in self._families:
                    return known
        raise _BadSample("name")

    def _set_number(self, name: str, labels: Mapping[str, object], value: object) -> None:
        values = [_number(one) for one in value] if isinstance(value, list | tuple) else [_number(value)]
        family = self._families[name]
        if family.kind != "histogram" and len(values) != 1:
            raise _BadSample("value")
        # A gauge may be NaN or infinite (a loss often is); a sum that swallowed one stays broken for good.
        if family.kind != "gauge" and not all(math.isfinite(one) and one >= 0 for one in values):
            raise _BadSample("value")
        child = self._child(name, labels)
        for one in values:
            if isinstance(child, Gauge):
                child.set(one)
            elif isinstance(child, Counter):
                child.inc(one)
            elif isinstance(child, Histogram):
                child.observe(one)
        self._register(name)

    def _set_info(self, name: str, labels: Mapping[str, object]) -> None:
        family, metric = self._families[name], self._metrics[name]
        if not set(labels) <= set(family.labels):
            raise _BadSample("labels")
        assert isinstance(metric, Info)
        metric.info({label: str(labels.get(label, ""))[:MAX_LABEL_LENGTH] for label in family.labels})

    def _set_state(self, state: object) -> None:
        metric = self._metrics["tandem_run_state"]
        assert isinstance(metric, Enum)
        if not isinstance(state, str) or state not in STATES:
            self.count_error("state")
            return
        metric.state(state)
        if state in FINAL_STATES:
            if self.state not in FINAL_STATES:
                self.final_since = time.monotonic()
        else:
            self.final_since = None
        self.state = state
        self.training_started = self.training_started or state == "training"

    def _child(self, name: str, labels: Mapping[str, object]) -> AnyMetric:
        family, metric = self._families[name], self._metrics[name]
        if set(labels) != set(family.labels):
            raise _BadSample("labels")
        if not labels:
            return metric
        key = tuple(str(labels[label])[:MAX_LABEL_LENGTH] for label in family.labels)
        for value, allowed in zip(key, family.labels.values(), strict=True):
            if allowed and value not in allowed:
                raise _BadSample("labels")
        if key not in self._series[name]:
            if len(self._series[name]) >= MAX_SERIES:
                raise _BadSample("series")
            self._series[name].add(key)
        return metric.labels(*key)

    def _clear(self, name: str) -> None:
        """Forget a gauge's series, such as ranks of a world that has shrunk."""
        metric = self._metrics[name]
        if not isinstance(metric, Gauge) or not self._families[name].labels:
            raise _BadSample("kind")
        metric.clear()
        self._series[name].clear()

    def _register(self, name: str) -> None:
        # Gauges come late: a 0 nobody measured would look like a measurement (a time stamp of 1970).
        if name not in self._registered:
            self._registered.add(name)
            self.registry.register(self._metrics[name])

    def _refresh(self) -> None:
        """Let the owner bring in what grows by itself, such as time."""
        try:
            self.before_page()
        except Exception:  # a page that is a little old is better than none
            self.count_error("refresh")

    def page(self) -> bytes:
        """All series in Prometheus' text format."""
        return self.negotiate("")[0]

    def negotiate(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type in the format that an HTTP Accept header asks for."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (ValueError, TypeError, IndexError):  # a version that is no version
            encoder, content_type = choose_encoder("")
        self._refresh()
        with self._lock:
            return encoder(self.registry), content_type

    def write_last_page(self, path: Path) -> None:
        """Write the page atomically (RUN_DIR/metrics.prom); raises OSError."""
        self._refresh()
        with self._lock:
            content = generate_latest(self.registry)
        write_bytes_atomic(path, content)


class _BadSample(Exception):
    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadSample("value")
    return float(value)


def _create(family: Family) -> AnyMetric:
    """The client's object for a family, in no registry yet."""
    labels = tuple(family.labels)
    if family.kind == "counter":
        return Counter(family.name, family.help, labels, registry=None)
    if family.kind == "gauge":
        return Gauge(family.name, family.help, labels, registry=None)
    if family.kind == "histogram":
        return Histogram(family.name, family.help, labels, registry=None, buckets=family.buckets)
    if family.kind == "info":
        return Info(family.name.removesuffix("_info"), family.help, registry=None)
    return Enum(family.name, family.help, registry=None, states=list(STATES))
