"""What `--elastic MIN:MAX` adds to an agent: nodes are waited for at the beginning, and one may leave.

A node that is asked to stop has all ranks save and stop after the same step, as ever. Then it goes, and the
others train on without it, as long as they are MIN and node 0, which has the store, is among them.
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
    """How long the least number of nodes waits for more: to settle in at first, and later for a moment only.

    The first generation of a store is that of a job that begins, or whose node 0 was started again: the other
    nodes are a few seconds away. Later on they are there, or lost.
    """

    def __init__(self, join_seconds: float, settle_seconds: float = FIRST_CALL_SECONDS) -> None:
        super().__init__(join=timedelta(seconds=join_seconds))
        self._settle, self._has_begun = timedelta(seconds=settle_seconds), False

    def has_begun(self) -> None:
        """A generation has begun since the store is there."""
        self._has_begun = True

    @property
    def last_call(self) -> timedelta:
        return timedelta(seconds=LAST_CALL_SECONDS) if self._has_begun else self._settle


class Departures:
    """Nodes that leave a generation while the others go on."""

    def __init__(self, placement: Placement, store: TCPStore) -> None:
        self._placement, self._store = placement, store

    def leaves(self, position: Position) -> None:
        """This node was asked to stop in the generation of `position`.

        Without --elastic nobody is asked: node 0 may be frozen, and its store would hold a node that ends.
        """
        if self._placement.elastic is None:
            return
        with contextlib.suppress(RuntimeError):
            self._store.add(self._key(position), 1)

    def others_go_on(self, position: Position) -> bool:
        """Whether nodes leave that generation, node 0 not among them, and enough stay."""
        if self._placement.elastic is None:
            return False
        with contextlib.suppress(RuntimeError, ValueError):
            leaving = self._store.add(self._key(position), 0)
            return leaving > 0 and position.nodes - leaving >= self._placement.elastic[0]
        return False

    def can_leave(self, position: Position) -> bool:
        """Whether this node can go, and leave the job to the others."""
        return self._placement.node_rank != 0 and self.others_go_on(position)

    @staticmethod
    def go(handler: DynamicRendezvousHandler) -> None:
        """Take this node out of the rendezvous, which would else wait for its silence."""
        with contextlib.suppress(RendezvousError):
            stop_keep_alive(handler)
            leave_rendezvous(handler)

    @staticmethod
    def _key(position: Position) -> str:
        return f"{position.store[2] if position.store else ''}/leaving"
