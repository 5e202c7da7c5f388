"""Judge which nodes are alive by this node's own clock.

torch's rendezvous writes each node's wall clock into the shared state and compares it with the reader's
clock. A node whose clock is six seconds behind would be dead to all others at once, and they would train
without it. Here the age of a heartbeat is the time since this node first saw it change, measured while this
node was running (running_clock.py). When this node writes the state, it restores the original values of the
other nodes.
"""

from datetime import UTC, datetime, timedelta
from typing import Any

from tandem import running_clock
from tandem.launch.elastic import LastCall

DEADLINE = "deadline"


class OwnClock:
    """Translate the times in the state of torch's dynamic rendezvous; one object per handler.

    The state also shows whether a generation has started, which `last_call` needs to know.
    """

    def __init__(self, last_call: LastCall) -> None:
        self._last_call = last_call
        self._seen: dict[Any, tuple[datetime, float]] = {}  # what was written, and when it was first read
        self._given: dict[Any, datetime] = {}  # what this node's rendezvous received instead

    def received(self, state: Any) -> Any:
        """Return the state as read, with every time converted as if this node's clock had written it."""
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
        """Return the state to write, with the others' times as they wrote them."""
        beats = state.last_heartbeats
        state.last_heartbeats = {node: self._restore(node, sent_at) for node, sent_at in beats.items()}
        if state.deadline is not None:
            state.deadline = self._restore(DEADLINE, state.deadline)
        return state

    def _translate(self, key: Any, written: datetime, ahead: timedelta = timedelta()) -> datetime:
        before = self._seen.get(key)
        now = running_clock.now()
        since = before[1] if before is not None and before[0] == written else now
        self._seen[key] = written, since
        self._given[key] = datetime.now(UTC) - timedelta(seconds=now - since) + ahead
        return self._given[key]

    def _restore(self, key: Any, sent_at: datetime) -> datetime:
        return self._seen[key][0] if self._given.get(key) == sent_at else sent_at
