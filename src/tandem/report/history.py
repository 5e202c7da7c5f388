"""The data of the live page: curves, events, checkpoints, ranks, and reads of data on object stores.

The history outlives rank 0, and a restarted agent reads it back from the run directory.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from tandem.bounded_reader import RunFiles
from tandem.errors import CheckpointError
from tandem.layout import METRICS
from tandem.run.directory import RunDir
from tandem.telemetry import metrics
from tandem.telemetry.journal import COUNTED
from tandem.telemetry.messages import Event, Message, Point, Ranks, RunStarted
from tandem.telemetry.metrics import Family
from tandem.telemetry.registry import Registry
from tandem.timeouts import LIST_SECONDS

MAX_POINTS = 1000
FULL_POINTS = 200
"""The newest points, which are never thinned out."""
MAX_EVENTS = 100


class History:
    """Collects rank 0's messages and this agent's events; of limited size, thread-safe."""

    def __init__(self, run: RunDir, files: RunFiles | None = None) -> None:
        """`files` is the reader of `run` to use, which also collects problems."""
        files = run.files() if files is None else files
        self._run = run
        self._lock = threading.Lock()
        self._points: list[dict[str, Any]] = []
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self._states: dict[int, str] = {}
        self._ranks = Ranks([], None)
        self._listed: tuple[float, list[dict[str, object]]] = (float("-inf"), [])
        self.version = 0
        points = files.lines(METRICS)
        events = files.events()
        for record in points:
            self._add_point(record)
        for record in events:
            if record.get("kind") != COUNTED:
                self._add_event(record)
        # `now` lists an address in a thread, which is too late for a report, because a report asks only once.
        if not run.is_here:
            self._look()

    @property
    def last_step(self) -> int:
        """The step of the newest point; 0 without one."""
        with self._lock:
            return max((int(point["step"]) for point in self._points[-2:]), default=0)

    def handle(self, message: Message) -> None:
        """Store the parts of a message that the page shows; ignore other messages."""
        with self._lock:
            match message:
                case RunStarted(step):
                    # Training repeats the later steps, and sends their points again.
                    self._points = [point for point in self._points if point["step"] <= step]
                    self._ranks = Ranks([], None)
                    self.version += 1
                case Point(step, moment, values):
                    self._add_point({"step": step, "time": moment, **values})
                case Event(kind, moment, values):
                    self._add_event({"time": moment, "kind": kind, **values})
                case Ranks():
                    self._ranks = message

    def _add_point(self, point: Mapping[str, Any]) -> None:
        if not isinstance(point.get("step"), int):
            return
        self._points.append(dict(point))
        if len(self._points) > MAX_POINTS:
            # Every second one of the older points stays, so a curve of any length keeps its beginning.
            self._points = self._points[:-FULL_POINTS:2] + self._points[-FULL_POINTS:]
        self.version += 1

    def _add_event(self, event: Mapping[str, Any]) -> None:
        self._events.append(dict(event))
        kind = event.get("kind")
        step = event.get("step")
        if isinstance(step, int) and kind in ("checkpoint", "checkpoint_verified", "fallback", "resumed"):
            verified = kind in ("checkpoint_verified", "resumed") or bool(event.get("verified"))
            self._states[step] = "damaged" if kind == "fallback" else "verified" if verified else "written"
            self._listed = (float("-inf"), self._listed[1])  # shown until the new list is there
        self._states = dict(list(self._states.items())[-MAX_EVENTS:])

    def curves(self) -> dict[str, object]:
        """Return the points of metrics.jsonl, oldest first, and their `version`."""
        with self._lock:
            return {"version": self.version, "points": list(self._points)}

    def now(self) -> dict[str, object]:
        """Return events and checkpoints, newest first, the last evaluation's scores, and the ranks' rows."""
        with self._lock:
            evaluated = (point["eval"] for point in reversed(self._points) if "eval" in point)
            return {
                "scores": next(evaluated, {}),
                "events": list(reversed(self._events)),
                "checkpoints": self._checkpoints(),
                "ranks": self._ranks.rows,
                "straggler": self._ranks.says,
                "history": self.version,
            }

    def _checkpoints(self) -> list[dict[str, object]]:
        """Return the checkpoints on the volume, listed at most every two seconds.

        An object store is listed in a thread, so no page waits for it.
        """
        now = time.monotonic()
        if now - self._listed[0] > LIST_SECONDS:
            self._listed = (now, self._listed[1])
            if self._run.is_here:
                self._look()
            else:
                threading.Thread(target=self._look, name="tandem-listing", daemon=True).start()
        return self._listed[1]

    def _look(self) -> None:
        with suppress(CheckpointError):  # keep the previous list
            self._listed = (time.monotonic(), list(self._list_checkpoints()))

    def _list_checkpoints(self) -> Iterator[dict[str, object]]:
        store = self._run.checkpoints
        for step in store.steps():
            with suppress(CheckpointError):  # damaged or just pruned
                manifest = store.manifest(step)
                size = sum(int(file["bytes"]) for file in manifest["files"].values())
                written = float(manifest["written_at"])
                state = self._states.get(step, "written")
                yield {"step": step, "time": written, "bytes": size, "state": state}


COLUMNS: Mapping[str, tuple[Family, Mapping[str, str]]] = {
    "bytes": (metrics.BLOCK_BYTES, {}),
    "needed_bytes": (metrics.BLOCK_NEEDED_BYTES, {}),
    **{name: (metrics.BLOCK_REQUESTS, {"outcome": name}) for name in metrics.REQUEST_OUTCOMES},
    "wait_seconds": (metrics.BLOCK_WAIT_SECONDS, {}),
    "ahead": (metrics.BLOCKS_AHEAD, {}),
    "hits": (metrics.BLOCK_CACHE_HITS, {}),
    "cache_bytes": (metrics.BLOCK_CACHE_BYTES, {}),
    "cache_limit_bytes": (metrics.BLOCK_CACHE_LIMIT_BYTES, {}),
}
"""Each column by its metric and the labels of its series. Counters count since the launch."""


def block_reads(registry: Registry) -> list[dict[str, float]]:
    """Return {"node", and COLUMNS} for each node that reads from object stores; empty if none does."""
    found = {name: registry.by_node(family, **labels) for name, (family, labels) in COLUMNS.items()}
    # The request counters of this node's agent exist from the start, as zeros.
    nodes = sorted(found["bytes"])
    return [
        {"node": node, **{name: values.get(node, 0.0) for name, values in found.items()}} for node in nodes
    ]
