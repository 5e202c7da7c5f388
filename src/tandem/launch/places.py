"""Decide which node gets which place in the job, for `--spares`. Pure: no store, no clock, no thread.

A place is a node rank of the job. A job with spares has more nodes than places; both are numbered from 0,
nodes by the rank they were started with. Node 0 hosts the store and decides, so it always has place 0.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tandem.telemetry.messages import checked

NO_PLACE = -1
MOST_FAILURES = 3
"""A node with this many failures is left out while another node can take its place."""
COMPUTES_WRONGLY = 1_000_000
"""Failures that are charged to a node whose results are wrong: it gets no place again."""


@dataclass(frozen=True)
class NodeReport:
    """A node's report to node 0, several times a second.

    `beat` changes with each report. `token` identifies one start of the node's agent. `place` is the node's
    place, or the one it had before node 0 was restarted (NO_PLACE: none). `has_run`: the node has started
    ranks in that place. `waits`: the node asks for a place.
    """

    beat: int
    token: str
    place: int
    waits: bool
    has_run: bool


class PlaceOwner(NamedTuple):
    """The node that has a place, by its number and the token of its agent."""

    node: int
    token: str


class Reassignment(NamedTuple):
    """`place` moves from node `before` (None: it was vacant) to `node`; `why` completes "node BEFORE ..."."""

    place: int
    node: int
    before: int | None
    why: str
    is_left_out: bool = False


class _NodeState(NamedTuple):
    report: NodeReport
    at: float


class PlaceTable:
    """Node 0's table of the places of a job of `nodes` nodes and `spares` spares.

    All times are seconds of one clock. A node that has not reported for `silence` is lost if the others wait
    for it; after `long_silence` it is lost even if its ranks still seem to run. `patience`: how long node 0
    waits, at the first start, for the node whose number is that of a place before a spare gets the place.
    """

    def __init__(
        self, nodes: int, spares: int, silence: float, long_silence: float, patience: float, now: float
    ) -> None:
        self.others = range(1, nodes + spares)
        self.holders: dict[int, PlaceOwner] = {}
        self._places = range(1, nodes)
        self._limits = silence, long_silence
        self._first_choice_ends = now + patience
        self._heard: dict[int, _NodeState] = {}
        self._losses = dict.fromkeys(self.others, 0)
        self._charged = dict.fromkeys(self.others, 0)

    def hear(self, node: int, report: NodeReport, now: float) -> None:
        """Record a report. The store keeps a silent node's last one, so only a new `beat` counts."""
        before = self._heard.get(node)
        if before is None or before.report.beat != report.beat:
            self._heard[node] = _NodeState(report, now)

    def charge(self, node: int, failures: int) -> None:
        """Record how many failures of its ranks a node has reported."""
        self._charged[node] = max(failures, self._charged[node])

    def failures(self, node: int) -> int:
        """Return how often a node was lost or its ranks have failed."""
        return self._losses[node] + self._charged[node]

    def waiting(self, now: float) -> list[int]:
        """Return the numbers of the nodes that wait for a place, the best first."""
        return self._heard_waiting(now - self._limits[1])

    def _candidates(self, now: float) -> list[int]:
        """Return the nodes of `waiting`, without those that may be lost themselves."""
        return self._heard_waiting(now - self._limits[0])

    def _heard_waiting(self, since: float) -> list[int]:
        held = set(self.holders.values())
        found = [
            node
            for node, (report, at) in self._heard.items()
            if report.waits
            and at >= since
            # A restarted agent has another token, so it may wait while its earlier start has a place.
            and PlaceOwner(node, report.token) not in held
            and self.failures(node) < COMPUTES_WRONGLY
        ]
        return sorted(found, key=lambda node: (self.failures(node), node))

    def decide(self, now: float, is_interrupted: bool, is_training: bool) -> list[Reassignment]:
        """Assign the places of missing or lost nodes; return the changes.

        `is_interrupted`: a generation has ended and the next one waits for its nodes. `is_training`: the
        ranks of node 0 have just finished a step, so the ranks of all nodes are alive.
        """
        changes = list[Reassignment]()
        for place in self._places:
            change = (
                self._replace(place, now, is_interrupted, is_training)
                if place in self.holders
                else self._fill(place, now)
            )
            if change is not None:
                self.holders[place] = PlaceOwner(change.node, self._heard[change.node].report.token)
                changes.append(change)
        return changes

    def _fill(self, place: int, now: float) -> Reassignment | None:
        """Give a place to the node that had it or has its number; if that node does not join, to a spare."""
        waiting = self._candidates(now)
        if (node := self._with_claim(place, waiting)) is not None:
            return Reassignment(place, node, None, "")
        if place in waiting:
            return Reassignment(place, place, None, "")
        # Nodes whose own place is taken, and those beyond the places.
        spare = [node for node in waiting if node not in self._places or node in self.holders]
        if spare and now > self._first_choice_ends:
            return Reassignment(place, spare[0], place, "has not come")
        return None

    def _replace(
        self, place: int, now: float, is_interrupted: bool, is_training: bool
    ) -> Reassignment | None:
        holder = self.holders[place]
        heard = self._heard[holder.node]
        waiting = self._candidates(now)
        # After a restart of node 0, a node that has trained takes precedence over one that has just arrived.
        if not heard.report.has_run and (node := self._with_claim(place, waiting)) is not None:
            return Reassignment(place, node, None, "")
        silence = now - heard.at
        if heard.report.token != holder.token:
            why = "was restarted"
        # While all ranks finish steps, a silent node's ranks are alive: only its reports do not arrive.
        elif silence > self._limits[0] and (is_interrupted or silence > self._limits[1]) and not is_training:
            why = f"has been silent for {silence:.1f} s"
        elif is_interrupted and self.failures(holder.node) >= MOST_FAILURES:
            waiting = [node for node in waiting if self.failures(node) < MOST_FAILURES]
            is_wrong = self.failures(holder.node) >= COMPUTES_WRONGLY
            why = "computes wrongly" if is_wrong else f"has failed {self.failures(holder.node)} times"
            return Reassignment(place, waiting[0], holder.node, why, is_left_out=True) if waiting else None
        else:
            return None
        if not waiting:
            return None
        # A node that was left out above for its failures has already been charged for them.
        self._losses[holder.node] += 1
        return Reassignment(place, self._candidates(now)[0], holder.node, why)

    def _with_claim(self, place: int, waiting: list[int]) -> int | None:
        for node in waiting:
            report = self._heard[node].report
            if report.has_run and report.place == place:
                return node
        return None


def to_text(holders: Mapping[int, PlaceOwner]) -> str:
    """Serialize the holder of each place for the store."""
    return json.dumps({str(place): list(holder) for place, holder in holders.items()})


def from_text(text: bytes) -> dict[int, PlaceOwner]:
    """Parse the output of `to_text`. Raises ValueError for anything else."""
    try:
        words = json.loads(text)
        return {int(place): PlaceOwner(int(node), str(token)) for place, (node, token) in words.items()}
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def report_from(text: bytes) -> NodeReport:
    """Parse a report of a node. Raises ValueError for anything else."""
    try:
        return checked(NodeReport, json.loads(text))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
