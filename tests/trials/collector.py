"""An OpenTelemetry collector on loopback: it decodes OTLP protobuf over HTTP, and answers as a test says."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from patience import patient


@dataclass(frozen=True)
class Seen:
    """A span, a point of a metric or a log record, with its resource; times are Unix seconds."""

    name: str
    resource: dict[str, Any]
    attributes: dict[str, Any]
    trace: str = ""
    span: str = ""
    parent: str = ""
    began: float = 0.0
    ended: float = 0.0
    is_error: bool = False
    value: float = 0.0
    is_cumulative_sum: bool = False
    links: list[str] = field(default_factory=list)
    message: Any = None

    @property
    def cause(self) -> str:
        return str(self.attributes["tandem.end.cause"])


class Collector:
    """Answers each request with `answers(path)`: a status, or seconds to hang before it closes."""

    def __init__(self, answers: Callable[[str], int | float] = lambda path: 200) -> None:
        self.answers = answers
        self.headers: dict[str, str] = {}
        self.requests: list[tuple[float, str, dict[str, str]]] = []
        self._taken: list[tuple[str, Any]] = []
        self._lock = threading.Lock()
        self._kinds = _kinds()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                answer = owner._take(self.path, dict(self.headers.items()), body)
                if isinstance(answer, float):
                    time.sleep(answer)
                    return
                self.send_response(answer)
                self.send_header("Content-Length", "0")
                for name, value in owner.headers.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that was killed

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _take(self, path: str, headers: dict[str, str], body: bytes) -> int | float:
        answer = self.answers(path)
        if headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        decoded = self._kinds[path].FromString(body)
        with self._lock:
            self.requests.append((time.monotonic(), path, {k.lower(): v for k, v in headers.items()}))
            if answer == 200:
                self._taken.append((path, decoded))
        return answer

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self, name: str | None = None) -> list[Seen]:
        """Each once: a request that a kill interrupts is sent again, and has to be the same."""
        found: dict[tuple[str, str], Seen] = {}
        for each in self._spans():
            assert found.setdefault((each.trace, each.span), each) == each
        return [each for each in found.values() if name in (None, each.name)]

    def logs(self) -> list[Seen]:
        return list(self._logs())

    def points(self, name: str) -> list[Seen]:
        """Those of a metric, in the order in which they arrived."""
        return [each for each in self._points() if each.name == name]

    def last(self, name: str, **attributes: str) -> float:
        """The newest value of a metric with these attributes."""
        found = [each for each in self.points(name) if attributes.items() <= each.attributes.items()]
        return max(found, key=lambda each: each.ended).value if found else -1.0

    def last_of_run(self, name: str, run: str) -> float:
        """The same of one of several runs."""
        found = [each for each in self.points(name) if each.resource["tandem.run"] == run]
        return max(found, key=lambda each: each.ended).value if found else -1.0

    def until(self, condition: Callable[[], bool], what: str, limit: float = 60.0) -> None:
        deadline = time.monotonic() + patient(limit)
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {limit:g} s"
            time.sleep(0.02)

    def _of(self, path: str) -> list[Any]:
        with self._lock:
            return [decoded for each, decoded in self._taken if each == path]

    def _spans(self) -> Iterator[Seen]:
        for request in self._of("/v1/traces"):
            for of_resource in request.resource_spans:
                resource = _plain(of_resource.resource.attributes)
                for each in (span for scope in of_resource.scope_spans for span in scope.spans):
                    yield Seen(
                        each.name, resource, _plain(each.attributes), each.trace_id.hex(), each.span_id.hex(),
                        each.parent_span_id.hex(), each.start_time_unix_nano / 1e9,
                        each.end_time_unix_nano / 1e9, each.status.code == 2,
                        links=[link.span_id.hex() for link in each.links],
                    )  # fmt: skip

    def _logs(self) -> Iterator[Seen]:
        for request in self._of("/v1/logs"):
            for of_resource in request.resource_logs:
                resource = _plain(of_resource.resource.attributes)
                for each in (record for scope in of_resource.scope_logs for record in scope.log_records):
                    yield Seen(
                        each.body.string_value, resource, _plain(each.attributes), each.trace_id.hex(),
                        each.span_id.hex(), began=each.time_unix_nano / 1e9, message=each,
                    )  # fmt: skip

    def _points(self) -> Iterator[Seen]:
        for request in self._of("/v1/metrics"):
            for of_resource in request.resource_metrics:
                resource = _plain(of_resource.resource.attributes)
                for each in (metric for scope in of_resource.scope_metrics for metric in scope.metrics):
                    data = getattr(each, each.WhichOneof("data"))
                    is_sum = each.HasField("sum") and each.sum.is_monotonic
                    for point in data.data_points:
                        yield Seen(
                            each.name, resource, _plain(point.attributes),
                            began=point.start_time_unix_nano / 1e9, ended=point.time_unix_nano / 1e9,
                            value=getattr(point, "as_double", 0.0),
                            is_cumulative_sum=is_sum and data.aggregation_temporality == 2, message=point,
                        )  # fmt: skip


def _kinds() -> dict[str, Any]:
    """The requests by path; imported here, because the extra `otel` may be missing."""
    from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    requests = ExportTraceServiceRequest, ExportMetricsServiceRequest, ExportLogsServiceRequest
    return dict(zip(("/v1/traces", "/v1/metrics", "/v1/logs"), requests, strict=True))


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
