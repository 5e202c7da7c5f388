"""Which rank was killed, and what it cost: one line on node 0's terminal, an event, and so a row of the page.

A killed rank's peers only see that it is gone. Its own agent sees the signal, and leaves word of it in the
agents' store before it goes into the next rendezvous; node 0 reads that when all train again.
"""

import contextlib
import json
import logging
import signal
import time
from collections.abc import Collection, Mapping

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.distributed.position import Position
from tandem.errors import GPU_FAILED, PEER_LOST, was_killed
from tandem.launch.endings import signal_name
from tandem.launch.part import Node
from tandem.launch.restarts import shell_code
from tandem.log import counted
from tandem.timeouts import MONITOR_SECONDS, OTHERS_SECONDS
from tandem.words import lasting

log = logging.getLogger("tandem.agent")

ABORTED = -signal.SIGABRT
"""What is noted for a rank that SIGABRT has ended. It explains nothing where another rank was killed: NCCL's
watchdog aborts the ranks that have lost it."""


class Recovery:
    """From the end of a generation to the first step of the next one, on one node."""

    def __init__(self, node: Node, store: TCPStore) -> None:
        self._node, self._store = node, store
        self._since: float | None = None  # when the last generation failed, until it has been told
        self._step, self._keys = 0, list[str]()
        self._is_aborted = False

    def failed(
        self,
        positions: Mapping[int, Position],
        codes: Mapping[int, int | None],
        aborted: Collection[int] = (),
    ) -> None:
        """A generation of ranks {local rank: position} has ended, with these codes so far.

        `aborted`: the local ranks that SIGABRT has ended.
        """
        first = positions[0]
        prefix = f"{first.store[2] if first.store else ''}/killed/"
        self._since, self._step = time.monotonic(), self._node.view.rank_zeros_step()
        self._keys = [f"{prefix}{node}" for node in range(first.nodes)]
        self._is_aborted = bool(aborted) and all(
            rank in aborted or code in (None, PEER_LOST) for rank, code in codes.items()
        )
        killed = [
            (positions[rank].rank, ABORTED if rank in aborted else code)
            for rank, code in codes.items()
            if code and was_killed(code)
        ]
        if killed:
            with contextlib.suppress(RuntimeError):  # the store is gone: there is nobody to read it
                self._store.set(f"{prefix}{first.node_rank}", json.dumps(killed))

    def has_lost_others(self) -> bool:
        """Whether the ranks here were aborted because a rank of another node was killed or has failed.

        Its agent has seen that before the watchdogs of the others; its word may still be on its way.
        """
        deadline = time.monotonic() + OTHERS_SECONDS
        while self._is_aborted and len(self._keys) > 1:
            if any(code != ABORTED for _, _, code in self._killed()):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(MONITOR_SECONDS)
        return False

    def interrupted(self, number: int) -> None:
        """It has ended for a node that waits to be let in: say whether one is new, or has lost a rank.

        A rank between two collectives, or one that computes for long, has not heard of it.
        """
        killed = ", ".join(_told(*each) for each in self._killed())
        level, why = (logging.WARNING, killed) if killed else (logging.INFO, "a node wants to join")
        log.log(level, "%s; restarting all ranks (generation %d)", why, number)

    def trains(self) -> None:
        """The next generation has finished a step: node 0 says what it cost, and who was killed, if any was.

        A script's steps are its own affair: nobody knows which of them it takes again.
        """
        since, self._since = self._since, None
        if since is None or self._node.placement.node_rank != 0:
            return
        seconds, plan = time.monotonic() - since, self._node.view.plan
        lost = max(0, self._step - plan.step) if plan is not None else None
        cost = "" if lost is None else f", {counted(lost, 'step')} lost"
        again = f"training again after {lasting(seconds)}{cost}"
        fields = {"seconds": round(seconds, 1), **({} if lost is None else {"steps_lost": lost})}
        killed = self._killed()
        for rank, node, code in killed:
            log.warning("%s; %s", _told(rank, node, code), again)
            told = {"rank": rank, "node": node, "signal": signal_name(shell_code(code))}
            self._node.view.event("rank_killed", **told, **fields)
        if not killed:  # a hang, a lost or a new node, a stop of one: said when it came
            log.info("%s", again)
            self._node.view.event("recovered", **fields)

    def _killed(self) -> list[tuple[int, int, int]]:
        """(rank, node, code) of all that were killed, as far as anybody has left word."""
        found = []
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            for node, key in enumerate(self._keys):
                if self._store.check([key]):
                    found += [(int(rank), node, int(code)) for rank, code in json.loads(self._store.get(key))]
        return [each for each in found if each[2] != ABORTED] or found


def _told(rank: int, node: int, code: int) -> str:
    if code == GPU_FAILED:
        return f"the GPU of rank {rank} on node {node} failed"
    return f"rank {rank} on node {node} was killed ({signal_name(shell_code(code))})"
