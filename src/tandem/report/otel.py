"""Send a run to an OpenTelemetry collector, configured by its standard variables; runs in a separate process.

All data comes from files of the run directory, one of which records how much has been sent. So nothing is
lost if this process is killed or the collector is down. https://opentelemetry.io/docs/specs/otel/
"""

import copy
import logging
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

from tandem import __version__, layout
from tandem.bounded_reader import content, parsed
from tandem.config.address import hidden, hide
from tandem.errors import ConfigError, TandemError
from tandem.report.log_lines import LogEntry, Mark, entries, new_lines
from tandem.report.tracking import KILLED, LONGEST_REASON
from tandem.run.directory import RunDir
from tandem.telemetry import ledger, metrics
from tandem.telemetry.journal import write_json_atomic
from tandem.telemetry.spans import LOG_FILE, Span, newest_metrics

log = logging.getLogger("tandem.tracker")

# OpenTelemetry's standard variables for this launch, and the attributes of its resource.

OTEL = "otel"
SIGNALS = ("metrics", "traces", "logs")
PREFIX = "OTEL_EXPORTER_OTLP_"
ENDPOINT = f"{PREFIX}ENDPOINT"
INTERVAL = "OTEL_METRIC_EXPORT_INTERVAL"
INTERVAL_SECONDS = 60.0
NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
INSTALL = "OpenTelemetry is not installed here; run: pip install 'tandem-train[otel]'"


class OtelChoice(NamedTuple):
    """The signals to send, the interval of metrics in seconds, and the problems with the variables."""

    signals: tuple[str, ...]
    interval: float
    problems: tuple[str, ...]

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "OtelChoice":
        """Return the choice in OpenTelemetry's standard variables; without an endpoint, no signals."""
        problems = []
        signals = []
        is_off = environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
        for signal in () if is_off else SIGNALS:
            wanted = environ.get(f"OTEL_{signal.upper()}_EXPORTER") or "otlp"
            address, endpoint = _of_signal(environ, signal, "ENDPOINT")
            if not endpoint or "otlp" not in [each.strip() for each in wanted.split(",")]:
                continue
            variable, protocol = _of_signal(environ, signal, "PROTOCOL")
            # The value may contain a password.
            if not endpoint.startswith(("http://", "https://")):
                problems.append(f"{address}: invalid value; expected http://HOST:4318 or https://...")
            elif protocol not in ("", "http/protobuf"):
                problems.append(
                    f"{variable}: unsupported value; set it to http/protobuf, "
                    f"and {address} to the collector's port for HTTP, which is usually 4318"
                )
            else:
                signals.append(signal)
        return cls(tuple(signals), _interval(environ), tuple(dict.fromkeys(problems)))


def _of_signal(environ: Mapping[str, str], signal: str, what: str) -> tuple[str, str]:
    """Return the name and value of the variable in effect: the signal's own one, if it is set."""
    own = f"{PREFIX}{signal.upper()}_{what}"
    name = own if environ.get(own) else f"{PREFIX}{what}"
    return name, environ.get(name, "")


def _interval(environ: Mapping[str, str]) -> float:
    with suppress(ValueError):
        seconds = float(environ.get(INTERVAL, "")) / 1000
        if math.isfinite(seconds) and seconds > 0:
            return seconds
    return INTERVAL_SECONDS


def is_installed() -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    return False


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Return whether this launch is sent to a collector; if not, log what prevents it."""
    choice = OtelChoice.of(environ)
    for problem in choice.problems:
        log.warning("%s; this is not sent to OpenTelemetry", problem)
    if choice.signals and not is_installed():
        log.warning("%s is set, but %s", _of_signal(environ, choice.signals[0], "ENDPOINT")[0], INSTALL)
        return False
    return bool(choice.signals)


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


# Send the files.

MOST_ROUNDS = 50
"""Requests for one file before the other files get their turn."""
MOST_BEGUN = 200
SAVES = {"checkpoint": ledger.FINISHED, "checkpoint_failed": ledger.FAILED}
"""Events about saves, with the cause with which their span ends."""
T = TypeVar("T")


class SendProgress:
    """The progress of sending, and the state to continue from: plain JSON, without fields of any other type.

    A copy is changed while data is sent, and replaces the original once the data has arrived.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        def typed(name: str, kind: type, default: Any) -> Any:
            return found[name] if isinstance(found.get(name), kind) else default

        self.identity: str = typed("identity", str, str(uuid4()))
        self.marks: dict[str, Any] = typed("marks", dict, {})  # by file name
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
            self.marks.setdefault(name, mark)

    def _began(self, record: Mapping[str, Any]) -> None:
        begun = [record["time"], self.trace, record["span"]]
        if begun not in self.begun:  # otherwise, its line is taken again
            self.begun = [*self.begun, begun][-MOST_BEGUN:]

    def saved(self, line: bytes) -> Span | None:
        """Return the span of a save from a line of events.jsonl, None for others and for earlier launches."""
        try:
            event = parsed(line)
            ended = float(event["time"])
            if event["kind"] not in SAVES or not self.begun or ended < self.begun[0][0]:
                return None
            trace, parent = self.at(ended)
            known = {f"tandem.{name}": event[name] for name in ("step", "bytes") if name in event}
            # The ID is the same if the span is sent again.
            span = sha256(f"{trace} {event['kind']} {event['step']} {ended}".encode()).hexdigest()[:16]
            began = ended - float(event.get("seconds") or 0.0)
            return Span(trace, span, parent, "save", began, ended, SAVES[event["kind"]], known)
        except (ValueError, KeyError, TypeError, AttributeError):
            return None

    def _ended(self, begin: Mapping[str, Any], now: float, cause: str, more: Mapping[str, Any]) -> Span:
        attributes = {**begin["attributes"], **more}
        link = begin.get("linked")
        known = self.trace, begin["span"], begin["parent"], str(begin["name"]), float(begin["time"])
        return Span(*known, float(now), str(cause), attributes, (link[0], link[1]) if link else None)

    def killed(self, at_most: float = math.inf) -> list[Span]:
        """End the spans that a killed launch left open, at the launch's last known time."""
        seen = min(max(self.last, self.metrics), at_most)
        newest = max(
            (each["time"] for each in self.open.values() if each["name"] == "generation"), default=0.0
        )
        spans = []
        for each in reversed(self.open.values()):  # inner spans have begun later
            is_older = each["parent"] and each["time"] < newest  # its cause was not known yet
            now, cause = (newest, ledger.OTHER) if is_older else (max(seen, each["time"]), ledger.KILLED)
            spans.append(self._ended(each, now, cause, {}))
        self.open = {}
        return spans

    def at(self, moment: float) -> tuple[str, str]:
        """Return the trace and the span that contain this time."""
        found = [each for each in self.begun if moment >= each[0]] or self.begun[:1]
        return (found[-1][1], found[-1][2]) if found else ("", "")


class OtelUpload:
    """Sends the unsent part of a run to the collector in the variables."""

    def __init__(self, run: RunDir, secrets: list[str], environ: Mapping[str, str]) -> None:
        """Raises ConfigError if the variables name none, or the package is missing."""
        self._choice = OtelChoice.of(environ)
        if not self._choice.signals:
            why = "; ".join(self._choice.problems) or f"set {ENDPOINT}=http://HOST:4318"
            raise ConfigError(f"no OpenTelemetry collector is configured: {why}")
        if not is_installed():
            raise ConfigError(INSTALL)
        from tandem.report.otlp import OtlpClient

        self._run = run
        self._secrets = secrets
        self.files = run.files()
        self._position = SendProgress(_read(run.logs / layout.OTEL_SENT))
        task = str(self.files.read(layout.CONFIG).get("task") or "")
        about = hidden(resource_of(environ, run.folder, task, self._position.identity), secrets)
        self._client = OtlpClient(self._choice.signals, about, secrets)
        self._due = 0.0
        self._ended: str | None = None

    def send(self, ended: str | None = None) -> int:
        """Send new data; return the number of records. Raises OtlpError, after which nothing is lost.

        `ended`: the state of a launch that has ended. All remaining data is then sent, including data that
        exists only at the end: the last metrics, and the spans that a kill left open.
        """
        self._ended = ended
        if ended is not None:
            self._client.try_all()
        problem: Exception | None = None
        sent = 0
        for part in (self._send_metrics, self._send_traces, self._send_logs):
            # A server for one signal may be down while the others' servers are up.
            try:
                sent += part()
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem
        return sent

    def catch_up(self) -> str:
        """Send all of a run that has ended; return a one-line result. Raises TandemError."""
        try:
            sent = self.send(KILLED)
        except Exception as error:
            raise TandemError(
                f"the collector does not accept it: {self.words(error)}; try again later"
            ) from error
        return f"{sent} records sent to the OpenTelemetry collector"

    def words(self, error: Exception) -> str:
        """Return a short description of the error, without a secret."""
        text = hide(" ".join(str(error).split()), self._secrets)
        return text[:LONGEST_REASON] or type(error).__name__

    def _send_traces(self) -> int:
        sent = self._send_file(self._run.logs / layout.OTEL_SPANS, _spans, self._client.send_spans)
        if self._position.begun:  # only then is the parent of a save known
            sent += self._send_file(self._run.folder / layout.EVENTS, _saves, self._client.send_spans)
        after = copy.deepcopy(self._position)
        if self._ended == KILLED and self._client.send_spans(after.killed()):
            self._keep(after)
        return sent

    def _send_logs(self) -> int:
        if "logs" not in self._choice.signals or not self._position.begun:
            return 0
        logs = self._run.logs
        names = sorted(each.name for each in logs.iterdir() if LOG_FILE.fullmatch(each.name))
        return sum(self._send_file(logs / name, self._entries, self._client.send_logs) for name in names)

    def _entries(
        self, path: Path, lines: list[bytes], position: SendProgress
    ) -> list[tuple[LogEntry, str, str]]:
        written = time.time()
        with suppress(OSError):  # just rotated
            written = path.stat().st_mtime
        found = (
            replace(each, text=hide(each.text, self._secrets)) for each in entries(lines, path.name, written)
        )
        # A log in text has times to the second.
        return [(each, *position.at(each.time + 0.5)) for each in found]

    def _send_file(
        self,
        path: Path,
        records_of: "Callable[[Path, list[bytes], SendProgress], list[T]]",
        send: Callable[[list[T]], bool],
    ) -> int:
        """Send the records that `records_of` makes of new lines, a request per chunk; return their number."""
        sent = 0
        for _ in range(MOST_ROUNDS) if self._ended is None else count():
            after = copy.deepcopy(self._position)
            known = Mark.of(after.marks.get(path.name))
            lines, mark = new_lines(path, known, self._ended is not None)
            if not lines or mark is None:
                break
            records = records_of(path, lines, after)
            # Logs belong to these spans, even if the spans do not arrive.
            self._position.begun = after.begun
            self._position.marks = after.marks
            if not send(records):
                break
            after.marks = {**after.marks, path.name: list(mark)}
            self._keep(after)
            sent += len(records)
        return sent

    def _send_metrics(self) -> int:
        if "metrics" not in self._choice.signals:
            return 0
        found = newest_metrics(self._run.logs)
        sent = 0
        for path in found[:-1]:  # of launches that have ended
            sent += self._send_snapshot(_read(path))
            path.unlink(missing_ok=True)
        now = time.monotonic()
        if found and (self._ended is not None or now >= self._due):
            snapshot = _read(found[-1])
            sent += self._send_snapshot(snapshot if self._ended is None else self._with_last_step(snapshot))
            self._due = now + self._choice.interval
        return sent

    def _send_snapshot(self, snapshot: Mapping[str, Any]) -> int:
        moment = snapshot.get("time")
        if not isinstance(moment, float) or moment <= self._position.metrics:
            return 0
        with suppress(KeyError, TypeError, ValueError, OverflowError):  # of no launch
            if self._client.send_metrics(snapshot):
                self._position.metrics = moment
                self._keep(self._position)
                return 1
        return 0

    def _with_last_step(self, snapshot: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics with the last step, which a killed agent may not have received."""
        began = snapshot.get("launch", math.inf)
        rows = [row for row in self.files.lines(layout.METRICS) if (row.get("time") or 0.0) >= began]
        if not rows:
            return snapshot
        row = rows[-1]
        families = {each["name"]: each for each in snapshot["families"]}
        step = families.get(metrics.GLOBAL_STEP.name, {"points": []})["points"]
        if step and step[0][1] >= row["step"]:
            return snapshot
        newer: list[tuple[metrics.Gauge, dict[str, str], Any]] = [
            (metrics.GLOBAL_STEP, {}, row["step"]), (metrics.LOSS, {"split": "train"}, row.get("loss")),
        ]  # fmt: skip
        for family, labels, value in newer:
            if isinstance(value, int | float):
                known = families.get(family.name, {"points": []})
                points = [*(each for each in known["points"] if each[0] != labels), [labels, value]]
                about = {"name": family.name, "help": family.help, "kind": family.kind}
                families[family.name] = {**about, "points": points}
        moment = max(float(snapshot["time"]), float(row["time"]))
        return {**snapshot, "families": [*families.values()], "time": math.nextafter(moment, math.inf)}

    def _keep(self, position: SendProgress) -> None:
        """Record what has arrived. After a kill before this, it is sent once more, with the same IDs."""
        self._position = position
        write_json_atomic(self._run.logs / layout.OTEL_SENT, vars(position))


def _spans(path: Path, lines: list[bytes], position: SendProgress) -> list[Span]:
    return [span for line in lines for span in position.take(line)]


def _saves(path: Path, lines: list[bytes], position: SendProgress) -> list[Span]:
    return [span for line in lines if (span := position.saved(line)) is not None]


def _read(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    with suppress(OSError, ValueError):
        found = parsed(content(path.parent, path.name))
        return found if isinstance(found, dict) else {}
    return {}
