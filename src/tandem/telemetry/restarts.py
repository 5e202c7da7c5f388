"""How often a run was started again, counted from the lines of its events.jsonl."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.families import Sample

COUNTED = "counted"
"""The first line of an events.jsonl that goes on where an older file ends: what was counted until then."""
PLANNED = "preemption"
"""The reason of a start after a stop that was asked for: counted for itself, and no restart."""


class Restarts:
    """How often a run's ranks were started again since it began, by any launch: counted from its events.

    A pod that takes the place of another goes on counting. A run that had finished, and is extended, begins.
    A start after a planned stop is no restart.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.by_reason: Counter[str] = Counter()
        self._next: str | None = None  # why, if ranks are started now; None: it would be the first time
        self._nodes: object = None
        self._is_over = False
        for event in events:
            self.take(str(event.get("kind")), event)

    @property
    def total(self) -> int:
        return self.by_reason.total() - self.planned_stops

    @property
    def planned_stops(self) -> int:
        """How often the run was stopped by a signal with all saved, and started again."""
        return self.by_reason[PLANNED]

    def earlier(self, anew: bool) -> list[Sample]:
        """What a launch goes on counting from; `anew`: from nothing, as where the run had finished."""
        if anew or self._is_over:
            self.by_reason.clear()
        return [sample(why, count) for why, count in self.by_reason.items()]

    def take(self, kind: str, event: Mapping[str, Any]) -> str | None:
        """The reason of the restart that this event is."""
        reason = None
        if kind == "world":
            if event.get("anew") or self._is_over:
                self.by_reason.clear()
                self._next = None
            if self._next is not None:
                reason = self._next if self._nodes in (None, event.get("nodes")) else "elastic"
                self.by_reason[reason] += 1
            self._next, self._nodes, self._is_over = "crash", event.get("nodes"), False
        elif kind == "hang":
            self._next = "hang"
        elif kind == "stopped" and self._next is not None:
            self._next = PLANNED
        elif kind == "finished":
            self._is_over = True
        elif kind == COUNTED:
            self._go_on_from(event)
        return reason

    def counted(self) -> dict[str, object]:
        """All of it, for the line COUNTED."""
        return {
            "restarts": dict(self.by_reason),
            "next": self._next,
            "nodes": self._nodes,
            "over": self._is_over,
        }

    def _go_on_from(self, event: Mapping[str, Any]) -> None:
        restarts, following = event.get("restarts"), event.get("next")
        if isinstance(restarts, dict):
            known = {why: number for why, number in restarts.items() if type(number) is int and number > 0}
            self.by_reason = Counter(known)
            self._next = following if isinstance(following, str) else None
            self._nodes, self._is_over = event.get("nodes"), event.get("over") is True


def sample(reason: str, count: int = 1) -> Sample:
    """The metric that counts a start for this reason."""
    return (
        metrics.PLANNED_STOPS.inc(count) if reason == PLANNED else metrics.RESTARTS.inc(count, reason=reason)
    )
