"""Send spans, logs and metrics over OTLP; the only module that imports OpenTelemetry (the extra `otel`).

Its exporters read endpoints, headers, certificates, compression and timeouts from their own variables
(OTEL_EXPORTER_OTLP_*). The records are built here, not by its instruments, because the measurements are in
files. So a counter keeps its start time when its sending process is restarted. `tracking.follow` repeats
failed requests, so that a collector that is down delays the end of a launch as little as possible.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

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
from tandem.config.address import hide
from tandem.errors import ConfigError
from tandem.report.log_lines import LogEntry
from tandem.telemetry.metrics import PLANNED_STOPS, RESTARTS
from tandem.telemetry.spans import Span
from tandem.timeouts import OTEL_LONGEST_WAIT_SECONDS, OTEL_NOT_SERVED_SECONDS, OTEL_REQUEST_SECONDS

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
"""Counters that a launch continues; the others start with the launch."""
NOT_SERVED = (404, 405, 501)
"""Answers of a server that does not accept this kind of data at all."""
TOO_MANY = 429
WORTH_ANOTHER = (401, 403, 408, TOO_MANY)
"""Transient answers from 400 to 499; after any other, the same data would be rejected again."""
MOST_TRIES = 3
"""Attempts with a server that asks for short pauses, before a request counts as failed."""
T = TypeVar("T")


class OtlpError(Exception):
    """The collector did not accept the data, but may accept it later."""


class _Session(requests.Session):
    """Makes one request and stores its result, which the exporters only log.

    The exporters repeat a request until their timeout, which many users set in milliseconds, as for other
    SDKs. So this class reports to them only failures that they do not retry.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.status: int | None = None
        self.problem = ""
        self.wait: float | None = None  # seconds, if the server asks for a pause

    def request(self, *arguments: Any, **options: Any) -> requests.Response:
        self.forget()
        # A redirected POST becomes a GET, whose answer looks like success.
        options["allow_redirects"] = False
        options["timeout"] = min(options.get("timeout") or OTEL_REQUEST_SECONDS, OTEL_REQUEST_SECONDS)
        try:
            response = self._answer(*arguments, **options)
        except Exception as error:
            self.problem = type(error).__name__
            raise requests.RequestException(str(error)) from error
        self.status = response.status_code
        self.problem = f"HTTP status {response.status_code}"
        if self.status == TOO_MANY or self.status >= 500:
            self.wait = _retry_after(response.headers.get("Retry-After", ""))
            raise requests.RequestException(self.problem)
        return response

    def _answer(self, *arguments: Any, **options: Any) -> requests.Response:
        try:
            return super().request(*arguments, **options)
        except requests.Timeout:
            raise
        except requests.ConnectionError:  # the server may have closed an idle connection
            return super().request(*arguments, **options)


def _retry_after(text: str) -> float | None:
    """Return the seconds that a Retry-After header asks for, with a limit; None if it is not valid."""
    with suppress(ValueError, TypeError, OverflowError):
        seconds = float(text) if text.isdecimal() else parsedate_to_datetime(text).timestamp() - time.time()
        return min(max(0.0, seconds), OTEL_LONGEST_WAIT_SECONDS)
    return None


class _WithoutSecrets(logging.Handler):
    """Prints OpenTelemetry's log without secrets: OpenTelemetry logs a header that it cannot parse."""

    def __init__(self, secrets: Sequence[str]) -> None:
        super().__init__()
        self._secrets = secrets

    def emit(self, record: logging.LogRecord) -> None:
        print(hide(self.format(record), self._secrets), file=sys.stderr)


class OtlpClient:
    """Sends the kinds of data in `signals` (traces, metrics, logs); others are dropped.

    A call returns True if the collector has accepted the data or rejected it for good, and False if it does
    not accept this kind of data at present. `attributes` describe this process and run;
    OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME override them.
    """

    def __init__(self, signals: Sequence[str], attributes: Mapping[str, str], secrets: Sequence[str]) -> None:
        """Raises ConfigError if the exporters do not accept their variables."""
        logger = logging.getLogger("opentelemetry")
        logger.handlers = [_WithoutSecrets(secrets)]
        logger.propagate = False
        self._resource = Resource.create().merge(Resource(attributes)).merge(OTELResourceDetector().detect())
        makers = {"traces": OTLPSpanExporter, "metrics": OTLPMetricExporter, "logs": OTLPLogExporter}
        self._sessions = {signal: _Session() for signal in signals}
        try:
            self._exporters: dict[str, Any] = {
                signal: makers[signal](session=session) for signal, session in self._sessions.items()
            }
        except ValueError as error:
            raise ConfigError(f"OTEL_EXPORTER_OTLP_*: {hide(str(error), secrets)}") from error
        self._pauses: dict[str, float] = {}
        self._waits: dict[str, tuple[float, str]] = {}
        self._has_warned: set[str] = set()

    def send_spans(self, spans: Sequence[Span]) -> bool:
        """Raises OtlpError."""
        return self._export("traces", _made(lambda span: _span(span, self._resource), spans))

    def send_logs(self, entries: Sequence[tuple[LogEntry, str, str]]) -> bool:
        """Send entries with trace and span. Raises OtlpError."""
        return self._export("logs", _made(lambda entry: _record(*entry, self._resource), entries))

    def send_metrics(self, snapshot: Mapping[str, Any]) -> bool:
        """Send a snapshot of `OtelFiles`. Raises OtlpError, and ValueError for anything else."""
        found = [_metric(each, snapshot) for each in snapshot["families"] if each["points"]]
        scoped = metric_types.ScopeMetrics(SCOPE, found, "")
        data = metric_types.ResourceMetrics(self._resource, [scoped], "")
        return self._export("metrics", metric_types.MetricsData([data]))

    def try_all(self) -> None:
        """Let the next calls send, even if the collector asked for a pause or did not accept this kind."""
        self._pauses.clear()
        self._waits.clear()

    def _export(self, signal: str, data: Any) -> bool:
        exporter = self._exporters.get(signal)
        if exporter is None or not data:
            return True
        if self._pauses.get(signal, 0.0) > time.monotonic():
            return False
        until, problem = self._waits.get(signal, (0.0, ""))
        if until > time.monotonic():
            raise OtlpError(problem)
        session = self._sessions[signal]
        for _ in range(MOST_TRIES):
            session.forget()
            with suppress(ValueError, TypeError, OverflowError):  # it cannot encode a damaged file's values
                exporter.export(data)
            if session.wait is None or session.wait > OTEL_REQUEST_SECONDS:
                break
            time.sleep(session.wait)
        return self._is_done(signal, session)

    def _is_done(self, signal: str, session: _Session) -> bool:
        status = session.status
        if status is not None and 200 <= status < 300:
            return True
        if status in NOT_SERVED:
            self._pauses[signal] = time.monotonic() + OTEL_NOT_SERVED_SECONDS
            say = "the OpenTelemetry collector does not accept %s (HTTP status %d); to send none, set %s=none"
            self._warn(signal, say, signal, status, f"OTEL_{signal.upper()}_EXPORTER")
            return False
        if session.problem and not (status and 400 <= status < 500 and status not in WORTH_ANOTHER):
            problem = f"{signal}: {session.problem}"
            if session.wait:
                self._waits[signal] = (time.monotonic() + session.wait, problem)
            raise OtlpError(problem)
        # Without a request, the exporter could not encode it.
        say = "the OpenTelemetry collector rejected some %s (%s); these are not sent again"
        self._warn(signal, say, signal, session.problem or "not valid")
        return True

    def _warn(self, signal: str, say: str, *values: object) -> None:
        if signal not in self._has_warned:
            self._has_warned.add(signal)
            log.warning(say, *values)


def _made(make: Callable[[T], Any], records: Sequence[T]) -> list[Any]:
    found = []
    for each in records:
        with suppress(ValueError, TypeError, OverflowError):  # of a damaged file
            found.append(make(each))
    return found


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
    """Return valid values of attributes; other types become text, and None is left out."""
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
