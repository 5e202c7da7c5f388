"""Keep the shared rendezvous state as JSON, because torch keeps it as a pickle.

Any client of the store can write there, and torch's own backend would unpickle it, which can run code. Here
every field is checked before torch's engine sees it. See docs/security.md.
"""

import json
import logging
import pickle
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
)

from tandem import running_clock
from tandem.config.slices import LaunchConfig
from tandem.launch.rendezvous import RUN_ID, StoreLostError, printable_line
from tandem.platforms.detection import Placement
from tandem.timeouts import (
    BACKOFF_SECONDS_A_NODE,
    FIRST_CALL_SECONDS,
    KEEP_ALIVE_ATTEMPTS,
    KEEP_ALIVE_SECONDS,
    LAST_CALL_SECONDS,
    RENDEZVOUS_POLL_SECONDS,
    TORCH_KEEP_ALIVE_SECONDS,
    TORCH_POLL_SECONDS,
)
from tandem.torch_private import handler_intervals, nodes_here, rendezvous_kinds, shorten_handler_waits

log = logging.getLogger("tandem.agent")

STATE_KEY = "tandem/rendezvous"
NO_STATE = b"none"
FEW_NODES = 16  # the largest number of nodes that poll as often as in timeouts.py
MOST_BYTES = 16 * 2**20
"""Enough for ten thousand nodes."""
NODES_NAMED = 8
FLAGS = ("complete", "closed")
WAITING = ("wait_list", "redundancy_list")


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


class WatchfulBackend(RendezvousBackend):
    """The state of the rendezvous in the agents' store.

    Each poll of a waiting node also checks signals and the job result. This node's own clock decides which
    nodes are alive (`ClockTranslator`). An invalid or missing state is replaced by the last valid one.
    """

    def __init__(
        self,
        store: TCPStore,
        last_call: LastCall,
        before_poll: Callable[[], None],
        is_gone: Callable[[str], bool] = lambda address: False,
    ) -> None:
        self._store = store
        self._is_gone = is_gone
        self._before_poll = before_poll
        self._clock = ClockTranslator(last_call)
        self._last = NO_STATE
        self._has_warned = False

    @property
    def name(self) -> str:
        return "tandem"

    def get_state(self) -> Any:
        """Return (state, token), or None if there is none yet."""
        self._before_poll()
        # A compare_set that expects no value reads the state, and restores it if the key is gone.
        return self._received(self._replace(b"", self._last))

    def set_state(self, state: bytes, token: Any = None) -> Any:
        """Compare and set the state; return (stored state, token, whether ours was stored).

        Returns None if there is no state.
        """
        # Pickled by torch's engine in this process, so it is trusted.
        text = to_text(self._clock.sent(pickle.loads(state)))
        expected = token or NO_STATE
        found = self._replace(expected, text)
        if found == expected and found != text:  # compare_set returns the expected value if the key is gone
            found = self._replace(b"", text)
        read = self._received(found)
        return None if read is None else (*read, found == text)

    def _replace(self, expected: bytes, text: bytes) -> bytes:
        """Write `text` if the value is `expected` (b"": none yet); return the value that is then there."""
        try:
            return bytes(self._store.compare_set(STATE_KEY, expected, text))  # type: ignore[arg-type]
        except (ValueError, RuntimeError, TimeoutError) as error:
            raise RendezvousConnectionError("the store on node 0 does not answer") from error

    def _received(self, found: bytes) -> Any:
        """Return (state by this node's clock, token), or None."""
        for _ in range(3):  # other nodes repair it as well
            # No node has written a state yet.
            if found == self._last == NO_STATE:
                return None
            try:
                state = from_text(found)
            except ValueError as error:
                if not self._has_warned:
                    self._has_warned = True
                    text = "ignoring an invalid rendezvous state in the store (%s)"
                    log.warning(text, printable_line(str(error)))
                found = self._replace(found, self._last)
                continue
            self._last = found
            state = self._clock.received(state)
            # The engine removes a node without a recent heartbeat.
            state.last_heartbeats |= {
                node: datetime.fromtimestamp(0, UTC)
                for node in state.last_heartbeats
                if self._is_gone(node.addr)
            }
            return pickle.dumps(state), found
        raise RendezvousConnectionError("the rendezvous state in the store is invalid, again and again")


def handler_of(
    placement: Placement,
    store: TCPStore,
    launch: LaunchConfig,
    before_poll: Callable[[], None],
    address: str | None = None,
    is_gone: Callable[[str], bool] = lambda address: False,
) -> DynamicRendezvousHandler:
    """Return torch's rendezvous handler for the nodes of this job, with the timeouts of `launch`.

    `address` is this node's name there. Nodes whose name `is_gone` count as dead at once.
    """
    low, high = placement.elastic or (placement.nodes, placement.nodes)
    timeout = LastCall(launch.master_timeout)
    pace = poll_intervals(high)
    # The engine orders nodes by the text of their address. The node rank in front keeps rank 0 on node 0.
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        RUN_ID,
        store,
        WatchfulBackend(store, timeout, before_poll, is_gone),
        low,
        high,
        local_addr=address or f"{placement.node_rank:06d}.{placement.local_name}",
        timeout=timeout,
        **handler_intervals(pace.alive_seconds, KEEP_ALIVE_ATTEMPTS, pace.backoff_seconds),
    )
    shorten_handler_waits(handler, pace.poll_seconds)
    return handler


class PollIntervals(NamedTuple):
    """Seconds between polls and between heartbeats, and the longest wait after a write that came too late."""

    poll_seconds: float
    alive_seconds: int
    backoff_seconds: float


def poll_intervals(nodes: int) -> PollIntervals:
    """Return how often a job of `nodes` nodes polls and writes the shared rendezvous state.

    Every heartbeat is written into the state and read by all nodes, so the total cost grows with the square
    of the number of nodes. Longer intervals keep it constant, up to torch's own intervals. A write succeeds
    only if no other node has written since the read. Many nodes that start at once would keep invalidating
    each other's writes, so each waits for a random time.
    """
    if nodes <= FEW_NODES:
        return PollIntervals(RENDEZVOUS_POLL_SECONDS, KEEP_ALIVE_SECONDS, 0.0)
    rarer = (nodes / FEW_NODES) ** 2
    poll = RENDEZVOUS_POLL_SECONDS * rarer
    alive = round(KEEP_ALIVE_SECONDS * rarer)
    backoff = min(BACKOFF_SECONDS_A_NODE * nodes, TORCH_KEEP_ALIVE_SECONDS)
    return PollIntervals(min(poll, TORCH_POLL_SECONDS), min(alive, TORCH_KEEP_ALIVE_SECONDS), backoff)


def describe_joined_nodes(handler: DynamicRendezvousHandler, placement: Placement) -> str:
    """Return how many nodes have joined and, if their number is fixed, which are missing.

    This node counts as joined.
    """
    here = nodes_here(handler)
    if here is None or placement.elastic is not None:
        return f"{'some' if here is None else len(here)} of {placement.nodes} nodes have joined"
    came = {address.partition(".")[0] for address in here} | {f"{placement.node_rank:06d}"}
    missing = [str(node) for node in range(placement.nodes) if f"{node:06d}" not in came]
    more = [f"{len(missing) - NODES_NAMED} more"] * (len(missing) > NODES_NAMED)
    joined = f"{placement.nodes - len(missing)} of {placement.nodes} nodes have joined"
    return f"{joined}, missing node {', '.join([*missing[:NODES_NAMED], *more])}" if missing else joined


def others_live(handler: DynamicRendezvousHandler, placement: Placement) -> bool:
    """Return whether other nodes are alive; without the store, they would start over.

    Raises RendezvousError.
    """
    handler.num_nodes_waiting()  # reads the state
    own_prefix = f"{placement.node_rank:06d}."
    return any(not address.startswith(own_prefix) for address in nodes_here(handler) or ())


def check_all_stay(handler: DynamicRendezvousHandler, nodes: int) -> None:
    """Raise StoreLostError if fewer than `nodes` nodes are alive after all had joined.

    The caller then rejoins the rendezvous.
    """
    here = nodes_here(handler)
    if here is not None and len(here) < nodes:
        raise StoreLostError(f"a node joined and left again: {len(here)} of {nodes} remain")


def to_text(state: Any) -> bytes:
    """Return a state of the engine as text for the store."""
    words: dict[str, Any] = {name: getattr(state, name) for name in ("round", *FLAGS)}
    words["deadline"] = state.deadline and state.deadline.isoformat()
    words["participants"] = [[*_words_of(node), rank] for node, rank in state.participants.items()]
    words |= {name: sorted(map(_words_of, getattr(state, name))) for name in WAITING}
    beats = state.last_heartbeats.items()
    words["last_heartbeats"] = [[*_words_of(node), beat.isoformat()] for node, beat in beats]
    return json.dumps(words, separators=(",", ":")).encode()


def from_text(text: bytes) -> Any:
    """Parse the output of `to_text`. Raises ValueError for anything else."""
    state_kind, _ = rendezvous_kinds()
    if len(text) > MOST_BYTES:
        raise ValueError(f"{len(text)} bytes")
    try:
        words = json.loads(text)
        state = state_kind()
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
    """Return whether all nodes have joined and started. Raises ValueError for an invalid state."""
    return bool(from_text(text).complete)


def _words_of(node: Any) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(words: Any) -> Any:
    address, process, index = words
    return rendezvous_kinds()[1](_checked(str, address)[:255], _number(process), _number(index))


def _checked(kind: type, value: Any) -> Any:
    # Compare types, because isinstance() would accept bool, a subclass of int.
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
