"""The state that nodes share while they meet, as data: torch keeps it as a pickle, which runs what it holds.

Whoever reaches the store can write there, and torch's own backend would run it. In the store there is JSON
instead, and what comes from there is checked field by field before the engine sees any of it.
"""

import json
import logging
import pickle
from collections.abc import Callable
from datetime import datetime
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
)

from tandem.config.slices import LaunchConfig
from tandem.launch.elastic import LastCall
from tandem.launch.liveness import OwnClock
from tandem.launch.rendezvous import RUN_ID, StoreLostError, one_line
from tandem.platforms.placement import Placement
from tandem.timeouts import (
    BACKOFF_SECONDS_A_NODE,
    KEEP_ALIVE_ATTEMPTS,
    KEEP_ALIVE_SECONDS,
    RENDEZVOUS_POLL_SECONDS,
    TORCH_KEEP_ALIVE_SECONDS,
    TORCH_POLL_SECONDS,
)
from tandem.torch_private import handler_pace, hasten_handler, nodes_here, rendezvous_kinds

log = logging.getLogger("tandem.agent")

STATE_KEY, NO_STATE = "tandem/rendezvous", b"none"
FEW_NODES = 16  # that look at the shared state as often as the table of times says
MOST_BYTES = 16 * 2**20
"""Far more than ten thousand nodes need."""
NODES_NAMED = 8
FLAGS, WAITING = ("complete", "closed"), ("wait_list", "redundancy_list")


class WatchfulBackend(RendezvousBackend):
    """The state of the rendezvous in the agents' store.

    Each poll of a waiting node also looks at signals and at the job's verdict. Whether others live is judged
    by this node's own clock (`liveness.py`). What is no state, or is gone, is replaced by the last that was.
    """

    def __init__(self, store: TCPStore, last_call: LastCall, before_poll: Callable[[], None]) -> None:
        self._store, self._before_poll, self._clock = store, before_poll, OwnClock(last_call)
        self._last, self._has_warned = NO_STATE, False

    @property
    def name(self) -> str:
        return "tandem"

    def get_state(self) -> Any:
        """(state, token), or None where there is none yet."""
        self._before_poll()
        return self._received(self._replace(b"", self._last))

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """(state, token, whether it is this one), or None."""
        text, expected = to_text(self._clock.sent(pickle.loads(state))), token or NO_STATE  # the engine's own
        found = self._replace(expected, text)
        if found == expected and found != text:  # the store says so of a key that is gone
            found = self._replace(b"", text)
        read = self._received(found)
        return None if read is None else (*read, found == text)

    def _replace(self, expected: bytes, text: bytes) -> bytes:
        """Write `text` where there is what was `expected`, or nothing for b""; what is there then."""
        try:
            return bytes(self._store.compare_set(STATE_KEY, expected, text))  # type: ignore[arg-type]
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store on node 0 does not answer") from error

    def _received(self, found: bytes) -> Any:
        """(state by this node's clock, token), or None."""
        for _ in range(3):  # others mend it as well
            if found == self._last == NO_STATE:
                return None
            try:
                state = from_text(found)
            except ValueError as error:
                if not self._has_warned:
                    self._has_warned = True
                    text = "ignoring an invalid rendezvous state in the store (%s)"
                    log.warning(text, one_line(str(error)))
                found = self._replace(found, self._last)
                continue
            self._last = found
            return pickle.dumps(self._clock.received(state)), found
        raise RendezvousConnectionError("the rendezvous state in the store is invalid, again and again")


def handler_of(
    placement: Placement, store: TCPStore, asked: LaunchConfig, before_poll: Callable[[], None]
) -> DynamicRendezvousHandler:
    """torch's handler for the nodes of this job, who wait for each other as it was `asked`."""
    low, high = placement.elastic or (placement.nodes, placement.nodes)
    timeout = LastCall(asked.master_timeout)
    pace = paces(high)
    # The engine orders nodes by the text of their address: the node rank in front keeps rank 0 on node 0.
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        RUN_ID,
        store,
        WatchfulBackend(store, timeout, before_poll),
        low,
        high,
        local_addr=f"{placement.node_rank:06d}.{placement.local_name}",
        timeout=timeout,
        **handler_pace(pace.alive_seconds, KEEP_ALIVE_ATTEMPTS, pace.backoff_seconds),
    )
    hasten_handler(handler, pace.poll_seconds)
    return handler


class Pace(NamedTuple):
    """Between two looks at who is there; between two signs of life; at most, after a write that came late."""

    poll_seconds: float
    alive_seconds: int
    backoff_seconds: float


def paces(nodes: int) -> Pace:
    """How often so many nodes look at, and write into, the state that they share.

    Each sign of life is written into it, and read by all: what that costs them together grows with the square
    of their number, and is kept from growing so up to where torch's own times begin. A write counts only
    where nobody else wrote meanwhile; many that began at once would keep each other from it, so each waits
    for a time of its own.
    """
    if nodes <= FEW_NODES:
        return Pace(RENDEZVOUS_POLL_SECONDS, KEEP_ALIVE_SECONDS, 0.0)
    rarer = (nodes / FEW_NODES) ** 2
    poll, alive = RENDEZVOUS_POLL_SECONDS * rarer, round(KEEP_ALIVE_SECONDS * rarer)
    backoff = min(BACKOFF_SECONDS_A_NODE * nodes, TORCH_KEEP_ALIVE_SECONDS)
    return Pace(min(poll, TORCH_POLL_SECONDS), min(alive, TORCH_KEEP_ALIVE_SECONDS), backoff)


def who_is_here(handler: DynamicRendezvousHandler, placement: Placement) -> str:
    """How many nodes have come, and of a fixed number who has not. This one is there, joined or not."""
    here = nodes_here(handler)
    if here is None or placement.elastic is not None:
        return f"{'some' if here is None else len(here)} of {placement.nodes} nodes have joined"
    came = {address.partition(".")[0] for address in here} | {f"{placement.node_rank:06d}"}
    missing = [str(node) for node in range(placement.nodes) if f"{node:06d}" not in came]
    more = [f"{len(missing) - NODES_NAMED} more"] * (len(missing) > NODES_NAMED)
    said = f"{placement.nodes - len(missing)} of {placement.nodes} nodes have joined"
    return f"{said}, missing node {', '.join([*missing[:NODES_NAMED], *more])}" if missing else said


def others_live(handler: DynamicRendezvousHandler, placement: Placement) -> bool:
    """Whether other nodes live, who would begin anew without the store. Raises RendezvousError."""
    handler.num_nodes_waiting()  # reads the state
    mine = f"{placement.node_rank:06d}."
    return any(not address.startswith(mine) for address in nodes_here(handler) or ())


def check_all_stay(handler: DynamicRendezvousHandler, nodes: int) -> None:
    """`nodes` have come, and none is taken for dead. Raises StoreLostError: go round again without it."""
    here = nodes_here(handler)
    if here is not None and len(here) < nodes:
        raise StoreLostError(f"a node joined and left again: {len(here)} of {nodes} remain")


def to_text(state: Any) -> bytes:
    """A state of the engine, for the store."""
    words: dict[str, Any] = {name: getattr(state, name) for name in ("round", *FLAGS)}
    words["deadline"] = state.deadline and state.deadline.isoformat()
    words["participants"] = [[*_words_of(node), rank] for node, rank in state.participants.items()]
    words |= {name: sorted(map(_words_of, getattr(state, name))) for name in WAITING}
    beats = state.last_heartbeats.items()
    words["last_heartbeats"] = [[*_words_of(node), beat.isoformat()] for node, beat in beats]
    return json.dumps(words, separators=(",", ":")).encode()


def from_text(text: bytes) -> Any:
    """The state of which `to_text` has given `text`. Raises ValueError for anything else."""
    state_kind, _ = rendezvous_kinds()
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes")
    try:
        words, state = json.loads(text), state_kind()
        state.round = _number(words["round"])
        for name in FLAGS:
            setattr(state, name, _checked(bool, words[name]))
        deadline = words["deadline"]
        state.deadline = None if deadline is None else _moment(deadline)
        state.participants = {_node(each): _number(rank) for *each, rank in words["participants"]}
        for name in WAITING:
            setattr(state, name, {_node(each) for each in words[name]})
        state.last_heartbeats = {_node(each): _moment(beat) for *each, beat in words["last_heartbeats"]}
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    return state


def is_complete(text: bytes) -> bool:
    """Whether all nodes have come, and begun. Raises ValueError for what `to_text` has not given."""
    return bool(from_text(text).complete)


def _words_of(node: Any) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(words: Any) -> Any:
    address, process, index = words
    return rendezvous_kinds()[1](_checked(str, address)[:255], _number(process), _number(index))


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{type(value).__name__} instead of {kind.__name__}")
    return value


def _number(value: Any) -> int:
    if not 0 <= _checked(int, value) < 2**31:
        raise ValueError("a number out of range")
    return int(value)


def _moment(text: Any) -> datetime:
    moment = datetime.fromisoformat(_checked(str, text))
    if moment.tzinfo is None:
        raise ValueError("a time without a zone")
    return moment
