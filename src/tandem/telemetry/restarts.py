"""Count the restarts of a run from the lines of its events.jsonl."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.families import Sample

COUNTED = "counted"
"""Kind of the first line in an events.jsonl that continues an older file: the counts until then."""
PLANNED = "preemption"
"""The reason for a start after a requested stop, which is counted separately and is no restart."""


class Restarts:
    """How often a run's ranks were restarted since it began, by any launch, from its events.

    A pod that replaces another continues the count. A finished run that is extended starts again at 0. A
    start after a planned stop is no restart.
    """

    def __init__(self, events: Iterable[Mapping[str, Any]] = ()) -> None:
        self.by_reason: Counter[str] = Counter()
        self._next: str | None = None  # the reason if ranks start now; None: it would be the first start
        self._nodes: object = None
        self._is_over = False
        for event in events:
            self.take(str(event.get("kind")), event)

    @property
    def total(self) -> int:
        return self.by_reason.total() - self.planned_stops

    @property
    def planned_stops(self) -> int:
        """How often the run was stopped by a signal with everything saved, and then started again."""
        return self.by_reason[PLANNED]

    def earlier(self, anew: bool) -> list[Sample]:
        """Return the counts that a launch continues; empty with `anew`, or if the run had finished."""
        if anew or self._is_over:
            self.by_reason.clear()
        return [sample(why, count) for why, count in self.by_reason.items()]

    def take(self, kind: str, event: Mapping[str, Any]) -> str | None:
        """Process an event; return the reason if it is a restart."""
        reason = None
        if kind == "world":
            if event.get("anew") or self._is_over:
                self.by_reason.clear()
                self._next = None
            if self._next is not None:
                # If the number of nodes differs, a node has left or joined, and that is the cause.
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
        return reason

    def counted(self) -> dict[str, object]:
        """Return all counts, for the line COUNTED."""
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


def sample(reason: str, count: int = 1) -> Sample:
    """Return the sample that counts a start with this reason."""
    return (
        metrics.PLANNED_STOPS.inc(count) if reason == PLANNED else metrics.RESTARTS.inc(count, reason=reason)
    )
