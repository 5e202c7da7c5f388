"""Write the files for OpenTelemetry on node 0: the spans of a launch, and its metrics.

`report/otel.py` sends both, from another process. The beginning and the end of a span are separate lines, so
that process can also end spans that a killed agent left open. Without OTEL_* variables, nothing is written.
"""

import json
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from tandem import layout
from tandem.bounded_reader import content, parsed
from tandem.rotation import LOG_BYTES, appending, rotate
from tandem.telemetry.agent_state import process_age_seconds
from tandem.telemetry.journal import to_json, write_bytes_atomic
from tandem.telemetry.ledger import FINISHED, OTHER, STOPPED, cause_in, cause_of
from tandem.telemetry.messages import Heartbeat, Message, Point, RunStarted, StepsDone
from tandem.timeouts import OTEL_FILE_SECONDS, OTEL_LAST_SECONDS

GOOD = (FINISHED, STOPPED, "node joined")
"""Causes of an end that is not an error."""
LOG_FILE = re.compile(r"(node|rank)-\d+\.log")
MOST_EPOCHS = 100
"""Limit for epochs that end between two messages of rank 0; of more, only the first and last are shown."""
Write = Callable[[dict[str, object]], object]


@dataclass(frozen=True)
class Span:
    """A span that has ended. IDs are hexadecimal, times are Unix seconds; `parent` is empty for a run.

    `linked`: trace and span of the previous launch, if there was one.
    """

    trace: str
    span: str
    parent: str
    name: str
    began: float
    ended: float
    cause: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    linked: tuple[str, str] | None = None

    @property
    def is_error(self) -> bool:
        return self.cause not in GOOD


@dataclass
class _Epoch:
    span: str
    number: int
    end_step: int


@dataclass
class _Evaluation:
    span: str
    step: int
    ended: float | None = None
    scores: dict[str, Any] | None = None


class Spans:
    """The spans of one launch: the run, its generations, and their epochs and evaluations.

    `write` takes the lines. Times of methods are Unix seconds. Thread-safe. Saves are in events.jsonl.
    """

    def __init__(self, write: Write, now: float, attributes: Mapping[str, object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._run = token_hex(8)
        self._generation = ""
        self._since = now
        self._epoch: _Epoch | None = None
        self._evaluation: _Evaluation | None = None
        self._plan = RunStarted(0, 0, 0)
        self._at = (0, now)
        self._undecided: list[str] = []
        self._undecided_since = now
        write(
            {"is": "launch", "trace": token_hex(16), "span": self._run, "time": now, "attributes": attributes}
        )

    def started(self, now: float, attributes: Mapping[str, object]) -> None:
        """Begin a generation: its ranks are about to start. The time since the previous one belongs to it."""
        with self._lock:
            self._generation = self._begin("generation", self._run, self._since, attributes)
            self._at = (0, now)

    def handle(self, message: Message, now: float) -> None:
        with self._lock:
            if not self._generation:
                return  # of a rank that ends
            match message:
                case Heartbeat(0, step, activity):
                    self._reach(step, now)
                    self._evaluate(activity == "eval", step, now)
                case StepsDone(step):
                    self._reach(step, now)
                case RunStarted(step):
                    self._plan = message
                    self._at = (step, now)
                    self._begin_epoch(step, now)
                case Point(_, _, {"eval": dict(scores)}) if self._evaluation is not None:
                    self._evaluation.scores = {f"tandem.score.{name}": each for name, each in scores.items()}

    def ended(self, now: float) -> None:
        """End a generation. Its cause becomes known later, from an event or at the end of the launch."""
        with self._lock:
            self._decide(OTHER)
            # An evaluation that fails, for example because another rank was killed, has no scores.
            if self._evaluation is not None and self._evaluation.scores is not None:
                self._end_evaluation(now)
            open_ones = [each.span for each in (self._epoch, self._evaluation) if each is not None]
            self._undecided = [*open_ones, *([self._generation] if self._generation else [])]
            self._undecided_since = self._since = now
            self._generation = ""
            self._epoch = None
            self._evaluation = None

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        """Learn from an event of the agent why the last generation ended."""
        if (cause := cause_of(kind, fields)) is not None:
            with self._lock:
                self._decide(cause)

    def closed(self, cause: str, reason: str, now: float, attributes: Mapping[str, object]) -> None:
        """End all spans; the text of `reason` may name the cause more exactly."""
        if cause not in (FINISHED, STOPPED):
            cause = cause_in(reason) or cause
        with self._lock:
            self._decide(cause)
        self.ended(now)
        with self._lock:
            self._decide(cause)
            self._end(self._run, now, cause, {"tandem.reason": reason, **attributes})

    def _begin(self, name: str, parent: str, now: float, attributes: Mapping[str, object]) -> str:
        span = token_hex(8)
        line = {"is": "begin", "name": name, "span": span, "parent": parent, "time": now}
        self._write({**line, "attributes": attributes})
        return span

    def _end(self, span: str, now: float, cause: str, attributes: Mapping[str, object]) -> None:
        self._write({"is": "end", "span": span, "time": now, "cause": cause, "attributes": attributes})

    def _decide(self, cause: str) -> None:
        for span in self._undecided:
            self._end(span, self._undecided_since, cause, {})
        self._undecided = []

    def _begin_epoch(self, step: int, now: float) -> None:
        length = self._plan.steps_per_epoch
        if self._epoch is None and length > 0 and step < self._plan.steps_planned:
            number = step // length + 1
            span = self._begin("epoch", self._generation, now, {"tandem.epoch": number, "tandem.step": step})
            self._epoch = _Epoch(span, number, number * length)

    def _reach(self, step: int, now: float) -> None:
        """Record finished steps. The time at which an epoch ended between two messages is interpolated."""
        before, since = self._at
        if step < before:
            return  # messages of two threads of the rank may overtake each other
        self._at = (step, now)
        if self._evaluation is not None and step > self._evaluation.step:
            self._end_evaluation(now)
        for _ in range(MOST_EPOCHS):
            if self._epoch is None or step < self._epoch.end_step:
                return
            at = self._epoch.end_step
            share = (at - before) / (step - before) if step > before else 1.0
            ended = since + max(0.0, share) * (now - since)
            self._end(self._epoch.span, ended, FINISHED, {})
            self._epoch = None
            self._begin_epoch(at, ended)
        if self._epoch is not None:
            self._end(self._epoch.span, now, FINISHED, {})
            self._epoch = None
            self._begin_epoch(step, now)

    def _evaluate(self, is_on: bool, step: int, now: float) -> None:
        """Note when an evaluation ended; the next step confirms it, as heartbeats may overtake others."""
        if step < self._at[0]:
            return
        if is_on and self._evaluation is None:
            span = self._begin("evaluation", self._generation, now, {"tandem.step": step})
            self._evaluation = _Evaluation(span, step)
        elif is_on and self._evaluation is not None:
            self._evaluation.ended = None
        elif self._evaluation is not None and self._evaluation.ended is None:
            self._evaluation.ended = now

    def _end_evaluation(self, now: float) -> None:
        if (one := self._evaluation) is not None:
            self._end(one.span, now if one.ended is None else one.ended, FINISHED, one.scores or {})
            self._evaluation = None


class OtelFiles:
    """The files for OpenTelemetry of one launch, in the directory of the logs; nothing until `open`.

    `snapshot` returns the metrics. Only a thread writes, because the volume may hang while heartbeats arrive.
    A full disk loses lines, nothing else.
    """

    def __init__(self, logs: Path, snapshot: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._logs = logs
        self._snapshot = snapshot
        self._lines: queue.SimpleQueue[dict[str, object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="tandem-otel", daemon=True)
        self._spans: Spans | None = None
        self._earlier: dict[str, list[int]] = {}
        self._launch = self._first = self._offset = 0.0

    def open(self, attributes: Mapping[str, object]) -> None:
        """Begin on node 0, before the ranks start. The launch began when this process did."""
        self._launch = time.time() - process_age_seconds()
        # These Unix times do not jump when the clock is set.
        self._offset = time.time() - time.monotonic()
        self._earlier = _sizes(self._logs)
        self._spans = Spans(self._lines.put, self._launch, attributes)
        self._thread.start()

    def started(self, attributes: Mapping[str, object]) -> None:
        if self._spans is not None:
            self._spans.started(self._now(), attributes)

    def handle(self, message: Message) -> None:
        if self._spans is not None:
            self._spans.handle(message, self._now())

    def ended(self) -> None:
        if self._spans is not None:
            self._spans.ended(self._now())

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        if self._spans is not None:
            self._spans.event(kind, fields)

    def finish(self, cause: str, reason: str, attributes: Mapping[str, object]) -> None:
        """Write how the launch ended, and its last metrics; wait until they are written, with a limit."""
        if self._spans is not None:
            self._spans.closed(cause, reason, self._now(), attributes)
            self.close()
            self._thread.join(OTEL_LAST_SECONDS)

    def close(self) -> None:
        """Write the last metrics, then stop."""
        self._lines.put(None)

    def _now(self) -> float:
        return time.monotonic() + self._offset

    def _write(self) -> None:
        self._first = first_launch(self._logs, self._launch)
        due = time.monotonic()
        is_open = True
        while is_open:
            line: dict[str, object] | None = {}
            with suppress(queue.Empty):
                line = self._lines.get(timeout=max(0.0, due - time.monotonic()))
            is_open = line is not None
            with suppress(OSError):
                if line:
                    self._append(line)
                if not is_open or time.monotonic() >= due:
                    due = time.monotonic() + OTEL_FILE_SECONDS
                    self._write_metrics()

    def _write_metrics(self) -> None:
        families = self._snapshot()
        record = {"launch": self._launch, "first": self._first, "time": self._now(), "families": families}
        path = self._logs / layout.otel_metrics(self._launch)
        # After a power loss, an older state is good enough.
        write_bytes_atomic(path, json.dumps(record, separators=(",", ":")).encode(), is_durable=False)

    def _append(self, line: dict[str, object]) -> None:
        is_first = line["is"] == "launch"
        if is_first:
            line = {**line, "logs": self._earlier}
            self._logs.mkdir(parents=True, exist_ok=True)
        path = self._logs / layout.OTEL_SPANS
        rotate(path, LOG_BYTES)
        # A killed agent may have left a line without an end.
        before = "\n" if is_first else ""
        with appending(path) as file:
            file.write(f"{before}{to_json(line)}\n".encode())


def first_launch(logs: Path, launch: float) -> float:
    """Return the start of the first launch whose counts this one continues, if known."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        newest = newest_metrics(logs)[-1]
        return min(launch, float(parsed(content(logs, newest.name))["first"]))
    return launch


def newest_metrics(logs: Path) -> list[Path]:
    """Return the files with metrics for OpenTelemetry, oldest launch first."""
    found = [path for path in logs.glob("otel-metrics-*.json") if path.stem.split("-")[-1].isdigit()]
    return sorted(found, key=lambda path: int(path.stem.split("-")[-1]))


def _sizes(logs: Path) -> dict[str, list[int]]:
    """Return {name: [inode, bytes]} of logs that earlier launches have written; empty in a new run."""
    if not (logs.parent / layout.EVENTS).exists():
        return {}
    found = {}
    for path in logs.iterdir() if logs.is_dir() else ():
        if LOG_FILE.fullmatch(path.name):
            with suppress(OSError):
                known = path.stat()
                found[path.name] = [known.st_ino, known.st_size]
    return found
