"""Implement `--elastic MIN:MAX`: wait for more nodes at the start, and let nodes leave later.

When a node is asked to stop, all ranks save and stop after the same step, as in any job. The node then leaves
the rendezvous, and the others train on if at least MIN remain and node 0, which hosts the store, is one of
them.
"""

import contextlib
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from tandem.distributed.position import Position
from tandem.platforms.placement import Placement
from tandem.timeouts import FIRST_CALL_SECONDS, LAST_CALL_SECONDS
from tandem.torch_private import leave_rendezvous, stop_keep_alive


class LastCall(RendezvousTimeout):
    """How long MIN nodes wait for more: `settle_seconds` at the start, LAST_CALL_SECONDS later.

    The first generation of a store belongs to a job that starts, or whose node 0 was restarted: the other
    nodes are a few seconds away. Later, missing nodes are lost.
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

    def leaves(self, position: Position) -> None:
        """Announce that this node was asked to stop in the generation of `position`.

        Without --elastic nothing is written. Node 0 may be frozen, and its store would delay a node that only
        has to exit.
        """
        if self._placement.elastic is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.add(self._key(position), 1)

    def others_continue(self, position: Position) -> bool:
        """Return whether nodes leave that generation and at least MIN remain.

        If node 0 is among them, its job result ends the job before the next rendezvous completes.
        """
        if self._placement.elastic is None:
            return False
        with contextlib.suppress(RuntimeError, ValueError):
            leaving = self._store.add(self._key(position), 0)
            return leaving > 0 and position.nodes - leaving >= self._placement.elastic[0]
        return False

    def can_leave(self, position: Position) -> bool:
        """Return whether this node can leave the job to the others."""
        return self._placement.node_rank != 0 and self.others_continue(position)

    @staticmethod
    def go(handler: DynamicRendezvousHandler) -> None:
        """Remove this node from the rendezvous, which would otherwise wait until its heartbeat times out."""
        with contextlib.suppress(RendezvousError):
            stop_keep_alive(handler)
            leave_rendezvous(handler)

    @staticmethod
    def _key(position: Position) -> str:
        return f"{position.store[2] if position.store else ''}/leaving"
