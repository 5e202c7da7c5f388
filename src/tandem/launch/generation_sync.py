"""Agree among the nodes on a generation: which ranks each node has, and which nodes wait to join, or leave.

torch reads the ranks from the store in C, where no signal is handled, and waits a minute for a node that
joined and disappeared again. Here every wait checks signals, the job result, and which nodes are still alive.
"""

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from tandem import running_clock
from tandem.launch.rendezvous import StoreLostError
from tandem.platforms.detection import Placement
from tandem.timeouts import MEMBERSHIP_SECONDS, SHORTEST_LOOK_SECONDS, STORE_READ_SECONDS
from tandem.torch_private import leave_rendezvous, stop_keep_alive
from tandem.work.base import PROGRESS


class GenerationStore:
    """The store of one round of the rendezvous; its reads wait for keys that other nodes have yet to write.

    Polls are at most `longest_pause` seconds apart. Between polls, `look` is called; an error that it raises
    ends the wait. `patience` is the limit for one key, in seconds. All other calls go to the store itself.
    """

    def __init__(
        self, store: Any, look: Callable[[], None], longest_pause: float, patience: float = STORE_READ_SECONDS
    ) -> None:
        self._store = store
        self._look = look
        self._longest_pause = longest_pause
        self._patience = patience

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        """Return the value of `key`.

        Raises StoreLostError if no node writes it in time, and any error of `look`.
        """
        self._await([key])
        return bytes(self._store.get(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of all `keys`; raises the same errors as `get`."""
        self._await(keys)
        return list(self._store.multi_get(keys))

    def _await(self, keys: Sequence[str]) -> None:
        deadline = running_clock.now() + self._patience
        pause = SHORTEST_LOOK_SECONDS
        while not self._store.check(list(keys)):
            self._look()
            if running_clock.now() > deadline:
                raise StoreLostError(f"a node joined but sent nothing for {self._patience} s")
            # The other nodes write within milliseconds, unless one is lost.
            time.sleep(pause)
            pause = min(2 * pause, self._longest_pause)


def agree_on_generation(store: Any, proposal: tuple[int, str] | None) -> tuple[str, int, str]:
    """Return (key prefix, number, what the run can resume from) of the generation, as its first node wrote.

    The first node passes its number and state as `proposal`, the others None. The prefix is unique, so no
    node reads keys of an earlier generation. Raises StoreLostError.
    """
    key = "tandem/generation"
    form = rf"\d{{1,9}}\.[0-9a-f]{{32}}\.({'|'.join(PROGRESS)})"
    if proposal is not None:
        # The number alone is not unique: it starts again when the agent of the first node is restarted.
        store.set(key, f"{proposal[0]}.{uuid.uuid4().hex}.{proposal[1]}")
    number, name, progress = agreed(store, key, form).split(".")
    return f"generation/{number}.{name}", int(number), progress


def agreed(store: Any, key: str, form: str) -> str:
    """Return what the first node wrote at `key` for all nodes.

    Raises StoreLostError if it does not match the pattern `form`.
    """
    text = bytes(store.get(key)).decode(errors="replace")
    # Without re.ASCII, \d also matches the digits of other scripts.
    if re.fullmatch(form, text, re.ASCII) is None:
        raise StoreLostError(f"invalid value {text[:40]!r} in the store for {key}")
    return text


RANKS_STORE_KEY = "tandem/master"


def publish_ranks_store(store: Any, address: str) -> None:
    """Tell the other nodes the address of the store that the first node hosts for this generation's ranks."""
    store.set(RANKS_STORE_KEY, address)


def ranks_store(store: Any) -> tuple[str, int]:
    """Return (host, port) of that store. Raises StoreLostError."""
    host, _, port = agreed(store, RANKS_STORE_KEY, r"[\w.:\[\]-]{1,255}:\d{1,5}").rpartition(":")
    return host, int(port)


def check_all_are_in(placement: Placement, nodes: int, node_rank: int) -> None:
    """Raise StoreLostError if a rendezvous of `nodes` nodes is not what the job asked for.

    `node_rank` is the rank that the rendezvous gave this node. With spares, a node that has just lost its
    place may have joined instead of another node.

    The caller then rejoins the rendezvous.
    """
    if placement.elastic is None and nodes != placement.nodes:
        asked = f"{nodes} of {placement.nodes} nodes"
        raise StoreLostError(f"the rendezvous started with {asked}, but all are required")
    if placement.spares and node_rank != placement.node_rank:
        raise StoreLostError(f"two nodes have joined for one place before node {placement.node_rank}")


class Departures:
    """Track nodes that leave a generation while the others continue (`--elastic MIN:MAX`).

    When a node is asked to stop, all ranks save and stop after the same step, as in any job. The node then
    leaves the rendezvous, and the others train on if at least MIN remain and node 0, which hosts the store,
    is one of them.
    """

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


class Membership:
    """Poll the rendezvous during one generation, from construction to `close`.

    If node 0's agent is stopped, its store does not answer. Then only the thread here blocks, and this node's
    agent continues to watch its ranks.
    """

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
