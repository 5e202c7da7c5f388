"""Who lives, by this node's own clock: the rendezvous state as a node may judge it.

torch's rendezvous writes the wall clock of each node into the shared state and compares it with the reader's.
A node six seconds behind is then dead to all others at once, and the rest trains without it. Here a heartbeat
is as old as it is long ago, by the time in which this node ran, that it was first seen to be new; what other
nodes have written is put back unchanged when this one writes.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from tandem import running
from tandem.launch.elastic import LastCall

DEADLINE = "deadline"


class OwnClock:
    """Translates the rendezvous state of torch's dynamic rendezvous; one for each handler.

    `last_call` is told when a generation has begun, which the state says to each node.
    """

    def __init__(self, last_call: LastCall) -> None:
        self._last_call = last_call
        self._seen: dict[Any, tuple[datetime, float]] = {}  # what was written, and when that was first read
        self._given: dict[Any, datetime] = {}  # what this node's rendezvous was told instead

    def received(self, state: Any) -> Any:
        """The state as it was read, with each time in it as if this node's clock had written it."""
        if state.round or state.complete:
            self._last_call.has_begun()
        beats = state.last_heartbeats
        state.last_heartbeats = {node: self._translate(node, written) for node, written in beats.items()}
        if state.deadline is not None:
            state.deadline = self._translate(DEADLINE, state.deadline, self._last_call.last_call)
        for gone in self._seen.keys() - beats.keys() - {DEADLINE}:
            del self._seen[gone], self._given[gone]
        return state

    def sent(self, state: Any) -> Any:
        """The state as it is to be written: with what this node did not change as the others wrote it."""
        beats = state.last_heartbeats
        state.last_heartbeats = {node: self._restore(node, told) for node, told in beats.items()}
        if state.deadline is not None:
            state.deadline = self._restore(DEADLINE, state.deadline)
        return state

    def _translate(self, key: Any, written: datetime, ahead: timedelta = timedelta()) -> datetime:
        before = self._seen.get(key)
        now = running.now()
        since = before[1] if before is not None and before[0] == written else now
        self._seen[key] = written, since
        self._given[key] = datetime.now(UTC) - timedelta(seconds=now - since) + ahead
        return self._given[key]

    def _restore(self, key: Any, told: datetime) -> datetime:
        return self._seen[key][0] if self._given.get(key) == told else told
