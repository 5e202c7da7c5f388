"""Send spans, logs and metrics over OTLP; the only module that imports OpenTelemetry (the extra `otel`).

Its exporters read endpoints, headers, certificates, compression and timeouts from their own variables
(OTEL_EXPORTER_OTLP_*). The records are built here instead of by its instruments, because what was measured is
in files: a counter then keeps its start time when the process that sends it is restarted.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import requests
from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk.metrics import export as metric_types
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from tandem import __version__
from tandem.report.log_lines import LogEntry
from tandem.telemetry.metrics import PLANNED_STOPS, RESTARTS
from tandem.telemetry.spans import Span

log = logging.getLogger("tandem.tracker")

NANO = 1_000_000_000
SCOPE = InstrumentationScope("tandem", __version__)
SAMPLED = TraceFlags(TraceFlags.SAMPLED)
SEVERITIES = {
    "debug": SeverityNumber.DEBUG,
    "info": SeverityNumber.INFO,
    "warning": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
    "critical": SeverityNumber.FATAL,
}
UNITS = {"_seconds": "s", "_bytes": "By", "_joules": "J", "_celsius": "Cel"}
SINCE_FIRST_LAUNCH = (RESTARTS.name, PLANNED_STOPS.name)
"""Counters that a launch continues; the others begin with the launch."""
NOT_SERVED = (404, 405, 501)
"""Answers of a server that does not take this kind of data at all."""
WORTH_ANOTHER = (401, 403, 408, 429)
"""Answers below 500 that may pass; after any other, the same data would be refused again."""
VARIABLES = {
    "traces": "OTEL_TRACES_EXPORTER",
    "metrics": "OTEL_METRICS_EXPORTER",
    "logs": "OTEL_LOGS_EXPORTER",
}


class OtlpError(Exception):
    """The collector did not take something that is worth another attempt."""


class _Session(requests.Session):
    """Keeps what became of the last request, which the exporters only log."""

    status: int | None = None
    problem = ""

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        self.status = None
        self.problem = ""
        try:
            response = super().request(*arguments, **options)
        except requests.RequestException as error:
            self.problem = type(error).__name__
            raise
        self.status = response.status_code
        self.problem = "" if response.ok else f"HTTP status {response.status_code}"
        return response


class OtlpClient:
    """Sends what `signals` names: traces, metrics, logs. Each call returns once the collector has the data.

    `attributes` describe this process and run; OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win over them.
    """

    def __init__(self, signals: Sequence[str], attributes: Mapping[str, str]) -> None:
        ours = Resource(attributes)
        self._resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        makers = {"traces": OTLPSpanExporter, "metrics": OTLPMetricExporter, "logs": OTLPLogExporter}
        self._sessions = {signal: _Session() for signal in signals}
        self._exporters: dict[str, Any] = {
            signal: makers[signal](session=session) for signal, session in self._sessions.items()
        }
        self._has_warned: set[str] = set()

    @property
    def signals(self) -> frozenset[str]:
        """What the server takes, as far as is known."""
        return frozenset(self._exporters)

    def send_spans(self, spans: Sequence[Span]) -> None:
        """Raises OtlpError."""
        self._export("traces", [_span(each, self._resource) for each in spans])

    def send_logs(self, entries: Sequence[tuple[LogEntry, str, str]]) -> None:
        """Send entries with trace and span. Raises OtlpError."""
        self._export("logs", [_record(*each, self._resource) for each in entries])

    def send_metrics(self, snapshot: Mapping[str, Any]) -> None:
        """Send what `OtelFiles` has written. Raises OtlpError, and ValueError if it is something else."""
        found = [_metric(each, snapshot) for each in snapshot["families"] if each["points"]]
        scoped = metric_types.ScopeMetrics(SCOPE, found, "")
        data = metric_types.ResourceMetrics(self._resource, [scoped], "")
        self._export("metrics", metric_types.MetricsData([data]))

    def _export(self, signal: str, data: Any) -> None:
        exporter = self._exporters.get(signal)
        if exporter is None or data == []:
            return
        session = self._sessions[signal]
        session.problem = ""
        if exporter.export(data).name == "SUCCESS":
            return
        status = session.status
        if status in NOT_SERVED:
            del self._exporters[signal]
            say = "the OpenTelemetry collector takes no %s (HTTP status %d); set %s=none to say so"
            log.warning(say, signal, status, VARIABLES[signal])
        elif status is not None and 400 <= status < 500 and status not in WORTH_ANOTHER:
            if signal not in self._has_warned:
                self._has_warned.add(signal)
                say = "the OpenTelemetry collector refuses some %s (HTTP status %d); they are left out"
                log.warning(say, signal, status)
        else:
            raise OtlpError(f"{signal}: {session.problem or 'no answer in time'}")


def _nano(seconds: float) -> int:
    return round(seconds * NANO)


def _context(trace: str, span: str) -> SpanContext:
    return SpanContext(int(trace, 16), int(span, 16), is_remote=False, trace_flags=SAMPLED)


def _span(span: Span, resource: Resource) -> ReadableSpan:
    problem = Status(StatusCode.ERROR, span.cause) if span.is_error else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace, span.span),
        parent=_context(span.trace, span.parent) if span.parent else None,
        resource=resource,
        attributes={**_plain(span.attributes), "tandem.end.cause": span.cause},
        links=[Link(_context(*span.linked))] if span.linked else [],
        kind=SpanKind.INTERNAL,
        status=problem,
        start_time=_nano(span.began),
        end_time=_nano(max(span.began, span.ended)),
        instrumentation_scope=SCOPE,
    )


def _record(entry: LogEntry, trace: str, span: str, resource: Resource) -> ReadableLogRecord:
    level = SEVERITIES.get(entry.level, SeverityNumber.UNSPECIFIED)
    record = LogRecord(
        timestamp=_nano(entry.time),
        observed_timestamp=_nano(entry.time),
        trace_id=int(trace or "0", 16),
        span_id=int(span or "0", 16),
        trace_flags=SAMPLED,
        severity_text=entry.level.upper(),
        severity_number=level,
        body=entry.text,
        attributes=_plain(entry.attributes),
    )
    return ReadableLogRecord(record, resource, SCOPE)


def _plain(attributes: Mapping[str, Any]) -> dict[str, str | bool | int | float]:
    """Return what an attribute can have; others become text, and None is left out."""
    return {
        name: value if isinstance(value, str | bool | int | float) else str(value)
        for name, value in attributes.items()
        if value is not None
    }


def _metric(family: Mapping[str, Any], snapshot: Mapping[str, Any]) -> metric_types.Metric:
    name = str(family["name"])
    began = _nano(snapshot["first" if name in SINCE_FIRST_LAUNCH else "launch"])
    data = _data(str(family["kind"]), family["points"], began, _nano(snapshot["time"]))
    unit = next((unit for suffix, unit in UNITS.items() if name.endswith(suffix)), "")
    return metric_types.Metric(name, str(family["help"]), unit, data)


def _data(kind: str, points: Sequence[Any], began: int, now: int) -> Any:
    cumulative = metric_types.AggregationTemporality.CUMULATIVE
    if kind == "histogram":
        found = [
            metric_types.HistogramDataPoint(
                attributes=_plain(labels), start_time_unix_nano=began, time_unix_nano=now, count=sum(counts),
                sum=total, bucket_counts=counts, explicit_bounds=bounds, min=None, max=None,  # type: ignore[arg-type,unused-ignore]
            )
            for labels, (bounds, counts, total) in points
        ]  # fmt: skip
        return metric_types.Histogram(found, cumulative)
    numbers = [
        metric_types.NumberDataPoint(_plain(labels), began, now, float(value)) for labels, value in points
    ]
    return metric_types.Sum(numbers, cumulative, True) if kind == "counter" else metric_types.Gauge(numbers)
