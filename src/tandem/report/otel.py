"""Send a run to an OpenTelemetry collector, as its standard variables say; runs in a separate process.

Everything is read from files of the run directory, and how far it has been sent is in one of them. So nothing
is lost if this process is killed, or if the collector is down. https://opentelemetry.io/docs/specs/otel/
"""

import copy
import logging
import math
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

from tandem import __version__, layout
from tandem.bounded_reader import content, parsed
from tandem.config.address import hide
from tandem.errors import ConfigError, TandemError
from tandem.report.log_lines import Mark, entries, new_lines
from tandem.report.tracking import KILLED, LONGEST_REASON
from tandem.run.directory import RunDir
from tandem.telemetry import ledger, metrics
from tandem.telemetry.journal import write_json_atomic
from tandem.telemetry.spans import LOG_FILE, Span, newest_metrics

log = logging.getLogger("tandem.tracker")

OTEL = "otel"
SIGNALS = ("metrics", "traces", "logs")
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_SECONDS = 60.0
AT_ONCE = 512
MOST_ROUNDS = 20
"""So many requests for one file, before the others have their turn again."""
MOST_BEGUN = 200
SAVES = {"checkpoint": ledger.FINISHED, "checkpoint_failed": ledger.FAILED}
"""Events about saves, and the cause of the span's end."""
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class OtelChoice(NamedTuple):
    """Which signals are sent, how often metrics are (seconds), and what is wrong with the variables."""

    signals: tuple[str, ...]
    interval: float
    problems: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "OtelChoice":
        """Return what OpenTelemetry's standard variables ask for; without an endpoint, nothing."""
        if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
            return cls((), INTERVAL_SECONDS, ())
        problems = []
        signals = []
        for signal in SIGNALS:
            name = f"OTEL_EXPORTER_OTLP_{signal.upper()}"
            wanted = environ.get(f"OTEL_{signal.upper()}_EXPORTER", "") or "otlp"
            endpoint_name = f"{name}_ENDPOINT" if environ.get(f"{name}_ENDPOINT") else ENDPOINT
            endpoint = environ.get(endpoint_name, "")
            if not endpoint or "otlp" not in [each.strip() for each in wanted.split(",")]:
                continue
            protocol_name = (
                f"{name}_PROTOCOL" if environ.get(f"{name}_PROTOCOL") else "OTEL_EXPORTER_OTLP_PROTOCOL"
            )
            protocol = environ.get(protocol_name, "") or "http/protobuf"
            if not endpoint.startswith(("http://", "https://")):
                problems.append(
                    f"{endpoint_name}: invalid value {endpoint[:60]!r}; expected http://HOST:4318 or https://..."
                )
            elif protocol != "http/protobuf":
                problems.append(
                    f"{protocol_name}: {protocol} is not supported; set it to http/protobuf, "
                    f"and {endpoint_name} to the collector's port for HTTP, which is usually 4318"
                )
            else:
                signals.append(signal)
        return cls(tuple(signals), _interval(environ), tuple(dict.fromkeys(problems)))


def _interval(environ: Mapping[str, str]) -> float:
    with suppress(ValueError):
        seconds = float(environ.get(INTERVAL, "")) / 1000
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    return INTERVAL_SECONDS


def is_installed() -> bool:
    """Return whether the extra `otel` is there."""
    with suppress(ModuleNotFoundError):
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return False


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether this launch is sent to a collector; log what keeps it from that."""
    choice = OtelChoice.of(environ)
    for problem in choice.problems:
        log.warning("%s; this is not sent to OpenTelemetry", problem)
    if choice.signals and not is_installed():
        say = "%s is set, but OpenTelemetry is not installed here; run: pip install 'tandem-train[otel]'"
        log.warning(say, next(name for name in (ENDPOINT, *sorted(environ)) if _is_endpoint(name, environ)))
        return False
    return bool(choice.signals)


def _is_endpoint(name: str, environ: Mapping[str, str]) -> bool:
    return name.startswith("OTEL_EXPORTER_OTLP_") and name.endswith("ENDPOINT") and bool(environ.get(name))


def resource_of(environ: Mapping[str, str], run: Path, task: str, identity: str) -> dict[str, str]:
    """Return attributes by the semantic conventions, as far as they are known."""
    found = {
        "service.name": "tandem",
        "service.version": __version__,
        "service.instance.id": identity,
        "host.name": socket.gethostname(),
        "tandem.run": run.name,
        "tandem.task": task,
    }
    if environ.get("KUBERNETES_SERVICE_HOST"):
        host = environ.get("HOSTNAME") or socket.gethostname()
        index = environ.get("JOB_COMPLETION_INDEX")
        # The pods of an Indexed Job have the host name JOB-INDEX; their names are longer.
        if index is None:
            found["k8s.pod.name"] = host
        elif host.endswith(f"-{index}"):
            found["k8s.job.name"] = host.removesuffix(f"-{index}")
        with suppress(OSError):
            found["k8s.namespace.name"] = NAMESPACE.read_text().strip()
    return {name: value for name, value in found.items() if value}


class Position:
    """What has been sent, and what is needed to continue: plain JSON, with fields of any other type left out.

    A copy is changed while something is sent, and takes the place of the original once it has arrived.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        def typed(name: str, kind: type, default: Any) -> Any:
            return found[name] if isinstance(found.get(name), kind) else default

        self.identity: str = typed("identity", str, str(uuid4()))
        self.spans: list[int] | None = typed("spans", list, None)
        self.events: list[int] | None = typed("events", list, None)
        self.logs: dict[str, Any] = typed("logs", dict, {})
        self.metrics: float = typed("metrics", float, 0.0)
        self.trace: str = typed("trace", str, "")
        self.run: str = typed("run", str, "")
        self.last: float = typed("last", float, 0.0)
        self.open: dict[str, Any] = typed("open", dict, {})
        self.begun: list[list[Any]] = typed("begun", list, [])  # time, trace and span of runs and generations

    def take(self, line: bytes) -> Iterator[Span]:
        """Process a line of otel-spans.jsonl; yield the spans that end with it. A bad line is skipped."""
        try:
            record = parsed(line)
            match record.get("is"):
                case "launch":
                    yield from self._launched(record)
                case "begin":
                    self.open[record["span"]] = record
                    if record["name"] == "generation":
                        self._began(record)
                case "end" if record["span"] in self.open:
                    begin = self.open.pop(record["span"])
                    yield self._ended(begin, record["time"], record["cause"], record["attributes"])
            self.last = max(self.last, float(record["time"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            pass

    def _launched(self, record: Mapping[str, Any]) -> Iterator[Span]:
        yield from self.killed(float(record["time"]))
        linked = [self.trace, self.run] if self.run else None
        self.trace, self.run = str(record["trace"]), str(record["span"])
        self.open = {self.run: {**record, "name": "run", "parent": "", "linked": linked}}
        self._began(record)
        for name, mark in record["logs"].items():
            self.logs.setdefault(name, mark)

    def _began(self, record: Mapping[str, Any]) -> None:
        self.begun = [*self.begun, [record["time"], self.trace, record["span"]]][-MOST_BEGUN:]

    def saved(self, line: bytes) -> Span | None:
        """Return the span of a save from a line of events.jsonl, None for others and for earlier launches."""
        try:
            event = parsed(line)
            ended = float(event["time"])
            if event["kind"] not in SAVES or not self.begun or ended < self.begun[0][0]:
                return None
            trace, parent = self.at(ended)
            known = {f"tandem.{name}": event[name] for name in ("step", "bytes") if name in event}
            # The same if it is sent again.
            span = sha256(f"{trace} {event['kind']} {event['step']} {ended}".encode()).hexdigest()[:16]
            began = ended - float(event.get("seconds") or 0.0)
            return Span(trace, span, parent, "save", began, ended, SAVES[event["kind"]], known)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _ended(self, begin: Mapping[str, Any], now: float, cause: str, more: Mapping[str, Any]) -> Span:
        attributes = {**begin["attributes"], **more}
        link = begin.get("linked")
        name = f"{begin['name']}"
        known = (
            self.trace,
            begin["span"],
            begin["parent"],
            name,
            float(begin["time"]),
            float(now),
            str(cause),
        )
        return Span(*known, attributes, (link[0], link[1]) if link else None)

    def killed(self, at_most: float = math.inf) -> list[Span]:
        """End what a killed launch has left open, at the last time at which anything is known of it."""
        seen = min(max(self.last, self.metrics), at_most)
        left = reversed(list(self.open.values()))  # inner spans have begun later
        spans = [self._ended(each, max(seen, each["time"]), ledger.KILLED, {}) for each in left]
        self.open = {}
        return spans

    def at(self, moment: float) -> tuple[str, str]:
        """Return trace and span to which something of this time belongs."""
        found = [each for each in self.begun if moment >= each[0]] or self.begun[:1]
        return (found[-1][1], found[-1][2]) if found else ("", "")


class OtelSending:
    """Sends the rest of a run to the collector that the variables name."""

    def __init__(self, run: RunDir, secrets: list[str], environ: Mapping[str, str]) -> None:
        """Raises ConfigError if the variables name none, or the package is missing."""
        self._choice = OtelChoice.of(environ)
        if not self._choice.signals:
            why = "; ".join(self._choice.problems) or f"set {ENDPOINT}=http://HOST:4318"
            raise ConfigError(f"no OpenTelemetry collector is configured: {why}")
        if not is_installed():
            raise ConfigError("OpenTelemetry is not installed here; run: pip install 'tandem-train[otel]'")
        from tandem.report.otlp import OtlpClient

        self._run = run
        headers = [value for name, value in environ.items() if name.endswith("_HEADERS")]
        parts = [part.partition("=")[2] for value in headers for part in value.split(",")]
        self._secrets = [*secrets, *headers, *parts]
        self.files = run.files()
        self._position = Position(_read(run.logs / layout.OTEL_SENT))
        task = str(self.files.read(layout.CONFIG).get("task") or "")
        about = resource_of(environ, run.folder, task, self._position.identity)
        self._client = OtlpClient(self._choice.signals, about)
        self._due = 0.0
        self._is_over = False

    def send(self) -> int:
        """Send what is new; return how many records. Raises OtlpError, after which nothing is lost."""
        problem: Exception | None = None
        sent = 0
        for part in (self._send_metrics, self._send_spans, self._send_saves, self._send_logs):
            # A server for one signal may be down while those of the others are not.
            try:
                sent += part()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return sent

    def end(self, state: str) -> None:
        """Send what only the end makes known: the last metrics, and the spans that a kill has left open."""
        self._is_over = True
        self._send_metrics()
        self._send_spans()
        self._send_saves()
        if state == KILLED:
            after = copy.deepcopy(self._position)
            self._client.send_spans(after.killed())
            self._kept(after)
        self._send_logs()

    def catch_up(self) -> str:
        """Send all of a run that has ended; return a one-line result. Raises TandemError."""
        try:
            sent = self.send()
            self.end(KILLED)
        except Exception as error:
            raise TandemError(
                f"the collector does not accept it: {self.words(error)}; try again later"
            ) from error
        return f"{sent} records sent to the OpenTelemetry collector"

    def words(self, error: Exception) -> str:
        """Return a short description of the error, without a secret."""
        text = hide(" ".join(str(error).split()), self._secrets)
        return text[:LONGEST_REASON] or type(error).__name__

    def _send_spans(self) -> int:
        sent = 0
        for _ in range(MOST_ROUNDS):
            after = copy.deepcopy(self._position)
            mark = Mark(*after.spans) if after.spans else None
            lines, mark = new_lines(self._run.logs / layout.OTEL_SPANS, mark, self._is_over)
            if not lines:
                break
            after.spans = list(mark) if mark else None
            spans = [span for line in lines for span in after.take(line)]
            for some in _batches(spans):
                self._client.send_spans(some)
            self._kept(after)
            sent += len(spans)
        return sent

    def _send_saves(self) -> int:
        sent = 0
        for _ in range(MOST_ROUNDS):
            known = self._position.events
            lines, mark = new_lines(
                self._run.folder / layout.EVENTS, Mark(*known) if known else None, self._is_over
            )
            if not lines or mark is None:
                break
            spans = [span for line in lines if (span := self._position.saved(line))]
            for some in _batches(spans):
                self._client.send_spans(some)
            self._position.events = list(mark)
            self._kept(self._position)
            sent += len(spans)
        return sent

    def _send_logs(self) -> int:
        if "logs" not in self._client.signals or not self._run.logs.is_dir():
            return 0
        names = sorted(each.name for each in self._run.logs.iterdir() if LOG_FILE.fullmatch(each.name))
        return sum(self._send_log(name) for name in names)

    def _send_log(self, name: str) -> int:
        path = self._run.logs / name
        sent = 0
        for _ in range(MOST_ROUNDS):
            known = self._position.logs.get(name)
            lines, mark = new_lines(path, Mark(*known) if known else None, self._is_over)
            if not lines or mark is None:
                break
            found = [
                # A log in text has times to the second.
                (entry, *self._position.at(entry.time + 0.5))
                for entry in entries(lines, name, path.stat().st_mtime)
            ]
            for some in _batches(found):
                self._client.send_logs(some)
            self._position.logs[name] = list(mark)
            self._kept(self._position)
            sent += len(found)
        return sent

    def _send_metrics(self) -> int:
        if "metrics" not in self._client.signals:
            return 0
        found = newest_metrics(self._run.logs)
        sent = 0
        for path in found[:-1]:  # of launches that have ended
            sent += self._send_snapshot(_read(path))
            path.unlink(missing_ok=True)
        now = time.monotonic()
        if found and (self._is_over or now >= self._due):
            self._due = now + self._choice.interval
            snapshot = _read(found[-1])
            sent += self._send_snapshot(self._with_last_step(snapshot) if self._is_over else snapshot)
        return sent

    def _send_snapshot(self, snapshot: Mapping[str, Any]) -> int:
        moment = snapshot.get("time")
        if not isinstance(moment, float) or moment <= self._position.metrics:
            return 0
        with suppress(KeyError, TypeError, ValueError):  # of no launch
            self._client.send_metrics(snapshot)
            self._position.metrics = moment
            self._kept(self._position)
            return 1
        return 0

    def _with_last_step(self, snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics with the last step, of which a killed agent may not have heard."""
        began = float(snapshot.get("launch") or math.inf)
        rows = [row for row in self.files.lines(layout.METRICS) if (row.get("time") or 0.0) >= began]
        if not rows:
            return snapshot
        row = rows[-1]
        newer: dict[str, tuple[dict[str, str], float]] = {metrics.GLOBAL_STEP.name: ({}, row["step"])}
        if isinstance(row.get("loss"), int | float):
            newer[metrics.LOSS.name] = ({"split": "train"}, row["loss"])
        families = list(snapshot.get("families") or ())
        known: list[Any] = next(
            (each["points"] for each in families if each["name"] == metrics.GLOBAL_STEP.name), []
        )
        if known and known[0][1] >= row["step"]:
            return snapshot
        families = [_with(each, *newer[each["name"]]) if each["name"] in newer else each for each in families]
        moment = max(float(snapshot["time"]), float(row["time"]))
        return {**snapshot, "families": families, "time": math.nextafter(moment, math.inf)}

    def _kept(self, position: Position) -> None:
        """Record what has arrived; after a kill before that, it is sent once more, with the same IDs."""
        self._position = position
        write_json_atomic(self._run.logs / layout.OTEL_SENT, vars(position))


def _with(family: Mapping[str, Any], labels: Mapping[str, str], value: float) -> dict[str, Any]:
    others = [point for point in family["points"] if point[0] != labels]
    return {**family, "points": [*others, [labels, value]]}


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    with suppress(OSError, ValueError):
        found = parsed(content(path.parent, path.name))
        return found if isinstance(found, dict) else {}
    return {}


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    rest = iter(items)
    while some := list(islice(rest, AT_ONCE)):
        yield some
