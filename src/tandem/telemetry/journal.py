"""Files of a run directory for users and scripts: events.jsonl, metrics.jsonl, atomic JSON files."""

import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from tandem.bounded_reader import RunFiles, numbers
from tandem.layout import EVENTS, METRICS
from tandem.rotation import EVENTS_BYTES, appending, exclusively, replace_full
from tandem.telemetry import metrics
from tandem.telemetry.metrics import Sample

# Count the restarts of a run from the lines of its events.jsonl.

COUNTED = "counted"
"""Kind of the first line in an events.jsonl that continues an older file: the counts until then."""
PLANNED = "preemption"
"""The reason for a start after a requested stop, which is counted separately and is no restart."""


class Restarts:
    """Counts the restarts of a run's ranks since it began, by any launch, from its events.

    A pod that replaces another continues the count. A finished run that is extended starts again at 0. A
    start after a planned stop is no restart.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.by_reason: Counter[str] = Counter()
        self._next: str | None = None  # the reason if ranks start now; None: it would be the first start
        self._nodes: object = None
        self._is_over = False
        for event in events:
            self.count(str(event.get("kind")), event)

    @property
    def total(self) -> int:
        return self.by_reason.total() - self.planned_stops

    @property
    def planned_stops(self) -> int:
        """How often the run was stopped by a signal with everything saved, and then started again."""
        return self.by_reason[PLANNED]

    def earlier(self, starts_over: bool) -> list[Sample]:
        """Return the counts that a launch continues; empty if it starts over, or if the run had finished."""
        if starts_over or self._is_over:
            self.by_reason.clear()
        return [_sample(why, number) for why, number in self.by_reason.items()]

    def count(self, kind: str, event: Mapping[str, Any]) -> Sample | None:
        """Process an event; return the sample that counts it, if it is a restart or a planned stop."""
        reason = None
        if kind == "world":
            if event.get("anew") or self._is_over:
                self.by_reason.clear()
                self._next = None
            if self._next is not None:
                # If the number of nodes differs, the cause is a node that left or joined.
                reason = self._next if self._nodes in (None, event.get("nodes")) else "elastic"
                self.by_reason[reason] += 1
            # A killed process writes no event, so this is the reason unless an event follows.
            self._next = "crash"
            self._nodes = event.get("nodes")
            self._is_over = False
        elif kind == "hang":
            self._next = "hang"
        elif kind == "stopped" and self._next is not None:
            self._next = PLANNED
        elif kind == "finished":
            self._is_over = True
        elif kind == COUNTED:
            self._go_on_from(event)
        return None if reason is None else _sample(reason)

    def counted(self) -> dict[str, object]:
        return {
            "restarts": dict(self.by_reason),
            "next": self._next,
            "nodes": self._nodes,
            "over": self._is_over,
        }

    def _go_on_from(self, event: Mapping[str, Any]) -> None:
        restarts = event.get("restarts")
        following = event.get("next")
        if isinstance(restarts, dict):
            known = {why: number for why, number in restarts.items() if type(number) is int and number > 0}
            self.by_reason = Counter(known)
            self._next = following if isinstance(following, str) else None
            self._nodes = event.get("nodes")
            self._is_over = event.get("over") is True


def _sample(reason: str, starts: int = 1) -> Sample:
    """Return the sample that counts starts with this reason."""
    return (
        metrics.PLANNED_STOPS.inc(starts)
        if reason == PLANNED
        else metrics.RESTARTS.inc(starts, reason=reason)
    )


logger = logging.getLogger("tandem")

BLOCK_BYTES = 64 * 1024


def plain(value: object) -> object:
    """Return a copy for strict JSON.

    NaN and infinities become "NaN", "Infinity", "-Infinity" (the spelling of protobuf's JSON mapping), and
    unknown types become their str().
    """
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    return str(value)


def to_json(value: object, indent: int | None = None) -> str:
    """Return any value as strict JSON."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_bytes_atomic(path: Path, content: bytes, is_durable: bool = True) -> None:
    """Replace `path` in one piece: readers see the old or the new content, never a part. Raises OSError.

    `is_durable`: the new content is on the disk when this returns, so a power loss cannot undo it.
    """
    # Several threads and processes may write the same file at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # does not follow a link
            file.write(content)
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        # A failed write, for example on a full disk, must not leave a part there.
        temporary.unlink(missing_ok=True)
        raise
    # A rename survives a power loss only if the directory has also been synced (fsync(2)).
    if is_durable:
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_json_atomic(path: Path, obj: object) -> None:
    """Replace `path` with `obj` as indented JSON, atomically. Raises OSError."""
    write_bytes_atomic(path, (to_json(obj, indent=2) + "\n").encode())


def read_events(run_dir: Path) -> Iterator[dict[str, Any]]:
    """Return the lines of a run's events.jsonl, after those of the older file if there is one."""
    return RunFiles(run_dir).events()


class Journal:
    """Appends to RUN_DIR/events.jsonl and metrics.jsonl. A full disk is logged once, never raised."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.events_path = run_dir / EVENTS
        self.metrics_path = run_dir / METRICS
        self.failures = 0
        self._lock = threading.Lock()

    def event(self, kind: str, **fields: object) -> None:
        """Append {"time": Unix seconds, "kind": kind, ...} to events.jsonl."""
        if self._append(self.events_path, {"time": time.time(), "kind": kind, **fields}) >= EVENTS_BYTES:
            self._go_on_in_new_file()

    def _go_on_in_new_file(self) -> None:
        """Rotate a full events.jsonl.

        The new file begins with the totals of all earlier events. Rank 0 and node 0's agent both append to
        it, and later readers lose nothing. Until that line is on disk, the older file has the same
        information.
        """
        fresh = self.events_path.with_name(f".{EVENTS}.new")
        # OSError: another process rotates the file, or has rotated it. The next event tries again if
        # necessary.
        with self._lock, suppress(OSError), exclusively(self.events_path, EVENTS_BYTES):
            counted = Restarts(read_events(self._run_dir)).counted()
            line = to_json({"time": time.time(), "kind": COUNTED, **counted})
            fresh.write_bytes(f"{line}\n".encode())
            replace_full(self.events_path, fresh)

    def metrics(self, step: int, **fields: object) -> None:
        """Append {"time": Unix seconds, "step": step, ...} to metrics.jsonl."""
        self._append(self.metrics_path, {"time": time.time(), "step": step, **fields})

    def scores_at(self, step: int) -> dict[str, float]:
        """Return the scores of the last evaluation at exactly this step; empty if there was none.

        Call it after `rewind`: this step's lines are then the last ones, so only they are read, however long
        the run.
        """
        scores: object = {}
        with suppress(OSError), self.metrics_path.open("rb") as file:
            at_step = takewhile(lambda found: _step_of(found[1]) >= step, _lines_backwards(file))
            whole = (json.loads(line) for _, line in at_step if _step_of(line) == step)
            scores = next((line["eval"] for line in whole if isinstance(line.get("eval"), dict)), {})
        return {name: float(value) for name, value in numbers(scores).items()}

    def rewind(self, step: int) -> int:
        """Drop the lines of metrics.jsonl after `step`, and incomplete ones; return how many were dropped.

        Lines are ordered by step, so the lines to drop are the last ones. They are read backwards and
        truncated, which is as fast in a long run as in a short one.
        """
        with self._lock:
            dropped = kept_bytes = 0
            try:
                with self.metrics_path.open("r+b") as file:
                    for end, line in _lines_backwards(file):
                        if line.endswith(b"\n") and _step_of(line) <= step:
                            kept_bytes = end
                            break
                        dropped += 1
                    if dropped:
                        file.truncate(kept_bytes)
            except FileNotFoundError:
                return 0
            except OSError as error:
                self._failed(self.metrics_path, error)
                return 0
            return dropped

    def _append(self, path: Path, record: dict[str, object]) -> int:
        """Append a line; return the length of the file, or 0 if it cannot be written."""
        line = (to_json(record) + "\n").encode()
        with self._lock:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with appending(path) as file:
                    # Otherwise this line would be appended to the incomplete one, and lost with it.
                    if _is_torn(file.fileno()):
                        line = b"\n" + line
                    file.write(line)
                    # The next failure is a new one, and is logged again.
                    self.failures = 0
                    return os.fstat(file.fileno()).st_size
            except OSError as error:
                self._failed(path, error)
        return 0

    def _failed(self, path: Path, error: OSError) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.warning("cannot write %s (%s); training continues", path, error.strerror or error)


def _is_torn(descriptor: int) -> bool:
    """Return True if the file's last line has no end, because its writer was killed."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def _lines_backwards(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield (end offset in the file, line) for each line, last line first."""
    end = file.seek(0, os.SEEK_END)
    block = BLOCK_BYTES
    while end > 0:
        start = max(0, end - block)
        file.seek(start)
        content = file.read(end - start)
        if start > 0:  # the part before the first newline may have begun earlier
            content = content[content.find(b"\n") + 1 :] if b"\n" in content[:-1] else b""
        block = BLOCK_BYTES if content else 2 * block  # the line is longer than the block
        for line in reversed(content.splitlines(keepends=True)):
            yield end, line
            end -= len(line)


def _step_of(line: bytes) -> float:
    """Return the step of a line; infinity if it has none, so that the line is dropped."""
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return math.inf
    return step if isinstance(step, int) else math.inf
