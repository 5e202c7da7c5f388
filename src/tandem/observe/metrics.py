"""Every metric tandem exports, declared once in `FAMILIES`, and the registry that holds their values.

Ranks send messages (plain dicts that fit JSON); `Metrics.apply` turns them into series. A message can be
wrong or hostile without harm: what cannot be applied is counted in `tandem_collect_errors{source}`.
"""

import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

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

from tandem.observe.journal import write_bytes_atomic

Kind = Literal["counter", "gauge", "histogram", "info", "state set"]
AnyMetric = Counter | Gauge | Histogram | Info | Enum

STATES = (
    "starting", "rendezvous", "resuming", "training", "evaluating", "checkpointing", "draining",
    "succeeded", "failed",
)  # fmt: skip
FINAL_STATES = ("succeeded", "failed")
MAX_SERIES = 64
MAX_LABEL_LENGTH = 200

PHASES = ("data", "transfer", "forward", "backward", "optimizer", "other")
ACTIVITIES = ("startup", "rendezvous", "resume", "train", "eval", "checkpoint", "drain")
SKIP_REASONS = ("amp_overflow", "nonfinite_loss", "nonfinite_grad")
RESTART_REASONS = ("elastic", "preemption", "crash", "hang", "unknown")
STEP_BUCKETS = tuple(0.001 * 2**i for i in range(17))
SAVE_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


@dataclass(frozen=True)
class Family:
    """One metric: `labels` maps a label to its values, () = any; `initial` None = absent until set."""

    name: str
    kind: Kind
    help: str
    group: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    initial: float | None = None

    @property
    def wire_names(self) -> tuple[str, ...]:
        """Names of the series as PromQL sees them."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)


def _any(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: () for name in names}


def _rows(group: str, kind: Kind, *rows: tuple[str, str] | tuple[str, str, dict[str, tuple[str, ...]]],
          initial: float | None = None, buckets: tuple[float, ...] = ()) -> tuple[Family, ...]:  # fmt: skip
    return tuple(
        Family(f"tandem_{row[0]}", kind, row[1], group, row[2] if len(row) == 3 else {}, buckets, initial)
        for row in rows
    )


FAMILIES: tuple[Family, ...] = (
    *_rows("identity", "info",
        ("build_info", "Versions of what runs.",
            _any("version", "revision", "python", "torch", "cuda", "nccl")),
        ("run_info", "What this run is.",
            _any("run", "task", "platform", "backend", "precision", "config_hash"))),
    *_rows("identity", "state set", ("run_state", "What the run is doing; exactly one state is 1.")),
    *_rows("identity", "gauge",
        ("world_size", "Ranks in the current world."),
        ("nodes", "Nodes in the current world."),
        ("run_start_timestamp_seconds", "When this launch started, Unix time.")),
    *_rows("progress", "gauge",
        ("epoch", "Epochs completed."),
        ("epochs_planned", "Epochs this run is to complete."),
        ("global_step", "Optimizer steps done since the run's first launch; survives restarts."),
        ("steps_planned", "Optimizer steps this run is to do."),
        ("progress_ratio", "Steps done over steps planned, 0 to 1."),
        ("estimated_completion_timestamp_seconds", "When training ends at the current pace, Unix time."),
        ("last_step_timestamp_seconds", "When the last reported step ended, Unix time.")),
    *_rows("progress", "counter",
        ("steps", "Optimizer steps done since the launch."),
        ("samples", "Training samples of all ranks since the launch."),
        ("steps_replayed", "Steps done again after a restart.")),
    *_rows("time", "histogram", ("step_duration_seconds", "Wall time of one optimizer step."),
        buckets=STEP_BUCKETS),
    *_rows("time", "counter",
        ("step_phase_seconds", "Step time by phase; the phases add up to the step.", {"phase": PHASES}),
        ("gradient_sync_seconds", "Gradient all-reduce time, hidden behind backward or exposed.",
            {"overlap": ("hidden", "exposed")}),
        ("gradient_sync_bytes", "Gradient bytes handed to the all-reduce."),
        ("activity_seconds", "Wall time by activity; adds up to the time since launch.",
            {"activity": ACTIVITIES})),
    *_rows("stragglers", "gauge",
        ("rank_compute_seconds_min", "Least time of a rank in a step before the gradient wait."),
        ("rank_compute_seconds_median", "Median over ranks of the time before the gradient wait."),
        ("rank_compute_seconds_max", "Most time of a rank in a step before the gradient wait."),
        ("slowest_rank", "The rank with the most compute time."),
        ("rank_compute_seconds", "Time in a step before the gradient wait, by rank.", _any("rank", "node")),
        ("rank_data_seconds", "Time in a step waiting for data, by rank.", _any("rank", "node"))),
    *_rows("optimisation", "gauge",
        ("loss", "Mean loss over all ranks in the last interval.", _any("split")),
        ("eval_score", "Score of the last evaluation.", _any("score")),
        ("learning_rate", "Learning rate of the last step.", _any("group")),
        ("grad_norm", "Gradient norm before clipping."),
        ("loss_scale", "Loss scale of fp16 training.")),
    *_rows("optimisation", "counter",
        ("grad_clips", "Steps whose gradients were clipped."),
        ("steps_skipped", "Steps whose update was left out.", {"reason": SKIP_REASONS}),
        ("data_errors", "Samples that could not be read.", _any("reason")),
        ("replica_mismatches", "Replicas whose parameters differed from rank 0's.")),
    *_rows("checkpoints", "counter",
        ("checkpoint_saves", "Checkpoints saved."),
        ("checkpoint_save_failures", "Checkpoint saves that failed."),
        ("checkpoint_loads", "Checkpoints loaded."),
        ("checkpoint_load_failures", "Checkpoint loads that failed."),
        ("checkpoint_fallbacks", "Loads that had to use an older checkpoint."),
        ("checkpoint_written_bytes", "Checkpoint bytes written."),
        ("checkpoint_blocked_seconds", "Time training stood still for checkpoints.")),
    *_rows("checkpoints", "histogram",
        ("checkpoint_save_duration_seconds", "Time from snapshot to committed checkpoint."),
        buckets=SAVE_BUCKETS),
    # Starts at 0 so that a run whose saves never succeed is stale too, instead of having no series.
    *_rows("checkpoints", "gauge", ("checkpoint_last_success_step", "Step of the last checkpoint."),
        initial=0.0),
    *_rows("checkpoints", "gauge",
        ("checkpoint_size_bytes", "Size of the last checkpoint."),
        ("checkpoint_last_success_timestamp_seconds", "When the last checkpoint was committed, Unix time."),
        ("checkpoint_interval_steps", "Steps between checkpoints, 0 if not by steps."),
        ("checkpoint_last_load_duration_seconds", "Time the last load took."),
        ("checkpoint_volume_available_bytes", "Free space on the checkpoint volume."),
        ("checkpoint_volume_size_bytes", "Size of the checkpoint volume.")),
    *_rows("life cycle", "counter",
        ("restarts", "Worlds opened again, by reason.", {"reason": RESTART_REASONS}),
        ("signals", "Signals received.", _any("signal")),
        ("log_messages", "Log messages at warning and above.", {"level": ("warning", "error", "critical")}),
        ("collect_errors", "Metric samples that could not be used.", _any("source"))),
    *_rows("efficiency", "counter", ("model_flops", "Floating point operations of the model, all ranks.")),
    *_rows("efficiency", "gauge", ("peak_flops", "Peak floating point operations a second of all devices.")),
)  # fmt: skip


class Metrics:
    """The values of all families in a registry of their own. Thread-safe; `apply` never raises."""

    def __init__(self, families: Iterable[Family] = FAMILIES) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call,unused-ignore]
        self.registry = CollectorRegistry()
        self.state: str = STATES[0]
        self.training_started = False
        self.final_since: float | None = None  # time.monotonic() of the final state
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
        if family.kind != "gauge" or family.initial is not None:
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

    def page(self) -> bytes:
        """All series in Prometheus' text format."""
        return self.negotiate("")[0]

    def negotiate(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type in the format that an HTTP Accept header asks for."""
        try:
            encoder, content_type = choose_encoder(accept)
        except (ValueError, TypeError, IndexError):  # a version that is no version
            encoder, content_type = choose_encoder("")
        with self._lock:
            return encoder(self.registry), content_type

    def write_last_page(self, path: Path) -> None:
        """Write the page atomically (RUN_DIR/metrics.prom); raises OSError."""
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


def wire_names(families: Iterable[Family] = FAMILIES) -> frozenset[str]:
    """Every series name that rules and dashboards may use."""
    return frozenset(name for family in families for name in family.wire_names)


def markdown_table(families: Iterable[Family] = FAMILIES) -> str:
    """The table of docs/metrics.md, one row per family, names as PromQL sees them."""
    lines = ["| group | metric | type | labels | meaning |", "|---|---|---|---|---|"]
    for family in families:
        name = family.wire_names[0] if family.kind != "histogram" else family.name
        labels = dict(family.labels) if family.kind != "state set" else {family.name: STATES}
        shown = "; ".join(f"{name}: {', '.join(known)}" if known else name for name, known in labels.items())
        lines.append(f"| {family.group} | `{name}` | {family.kind} | {shown} | {family.help} |")
    return "\n".join(lines) + "\n"
