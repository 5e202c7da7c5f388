"""Track which nodes wait to join, leave, or are alive.

If node 0's agent is stopped, its store does not answer. Then only the thread here blocks, and this node's
agent continues to watch its ranks.
"""

import contextlib
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from tandem import running_clock
from tandem.platforms.detection import Placement
from tandem.timeouts import FIRST_CALL_SECONDS, LAST_CALL_SECONDS, MEMBERSHIP_SECONDS
from tandem.torch_private import leave_rendezvous, stop_keep_alive

# Implement `--elastic MIN:MAX`: wait for more nodes at the start, and let nodes leave later.
#
# When a node is asked to stop, all ranks save and stop after the same step, as in any job. The node then
# leaves the rendezvous, and the others train on if at least MIN remain and node 0, which hosts the store, is
# one of them.


class LastCall(RendezvousTimeout):
    """Limit for which MIN nodes wait for more: `settle_seconds` at the start, LAST_CALL_SECONDS later.

    In a store's first generation, the job has just started or its node 0 was restarted: the other nodes
    arrive within seconds. Later, missing nodes are lost.
    """

    def __init__(self, join_seconds: float, settle_seconds: float = FIRST_CALL_SECONDS) -> None:
        super().__init__(join=timedelta(seconds=join_seconds))
        self._settle = timedelta(seconds=settle_seconds)
        self._has_begun = False

    def has_begun(self) -> None:
        """Record that a generation has started since the store was created."""
        self._has_begun = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=LAST_CALL_SECONDS) if self._has_begun else self._settle


class Departures:
    """Track nodes that leave a generation while the others continue."""

    def __init__(self, placement: Placement, store: TCPStore) -> None:
        self._placement = placement
        self._store = store
        self._key = ""
        self._nodes = 0

    def begin_generation(self, prefix: str, nodes: int) -> None:
        """Track a generation of `nodes` from now on, whose keys in the store begin with `prefix`."""
        self._key = f"{prefix}/leaving"
        self._nodes = nodes

    def leaves(self) -> None:
        """Announce that this node was asked to stop in this generation.

        Without --elastic nothing is written. Node 0 may be frozen, and its store would delay a node that only
        needs to exit.
        """
        if self._placement.elastic is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.add(self._key, 1)

    def others_continue(self) -> bool:
        """Return whether nodes leave this generation and at least MIN remain.

        If node 0 is among them, its job result ends the job before the next rendezvous completes.
        """
        if self._placement.elastic is None:
            return False
        with contextlib.suppress(RuntimeError, ValueError):
            leaving = self._store.add(self._key, 0)
            return leaving > 0 and self._nodes - leaving >= self._placement.elastic[0]
        return False

    def can_leave(self) -> bool:
        """Return whether this node can leave the job to the others."""
        return self._placement.node_rank != 0 and self.others_continue()

    @staticmethod
    def go(handler: DynamicRendezvousHandler) -> None:
        """Remove this node from the rendezvous, which would otherwise wait until its heartbeat times out."""
        with contextlib.suppress(RendezvousError):
            stop_keep_alive(handler)
            leave_rendezvous(handler)


# Judge by this node's own clock which nodes are alive.
#
# torch's rendezvous writes each node's wall clock into the shared state and compares it with the reader's
# clock. A node whose clock is six seconds behind would be dead to all others at once, and they would train
# without it. Here the age of a heartbeat is the time since this node first saw it change, measured while this
# node was running (running_clock.py). When this node writes the state, it restores the original values of the
# other nodes.

DEADLINE = "deadline"


class ClockTranslator:
    """Translate the times in the state of torch's dynamic rendezvous; one object per handler.

    The state also shows whether a generation has started, which `last_call` needs to know.
    """

    def __init__(self, last_call: LastCall) -> None:
        self._last_call = last_call
        self._seen: dict[Any, tuple[datetime, float]] = {}  # the time as written, and when it was first read
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


class Membership:
    """Poll the rendezvous during one generation, from construction to `close`."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._closing = threading.Event()
        self._found = False
        self._error: Exception | None = None
        threading.Thread(target=self._look, name="tandem-membership", daemon=True).start()

    def is_awaited(self) -> bool:
        """Return whether other nodes waited to join at the last poll. Raises the poll's error."""
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """Stop polling. A poll that is blocked is left alone; its thread is a daemon."""
        self._closing.set()

    def _look(self) -> None:
        while not self._closing.wait(MEMBERSHIP_SECONDS):
            try:
                self._found = self._ask()
            except Exception as error:  # re-raised in the agent's thread, which handles it
                self._error = error
                return
