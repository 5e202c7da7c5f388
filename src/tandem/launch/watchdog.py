"""Hangs, by name: which rank, on which node, in which phase of which step, and since when.

Ranks tell their agent where they are (`heartbeat.py`); agents tell node 0 through the store; node 0's agent
judges. None of this is in the path of a collective, and each part that may block has a thread of its own:

    exchange    talks with the store: publishes this node's ranks, the metrics that it alone has, and the
                alarm (node 0: reads the others')
    judge       looks at what is known, never waits; on a node that cannot reach the store it cuts the
                store's connections, which wakes the agent out of any read it hangs in
"""

import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.launch.rendezvous import read_all
from tandem.process import stat_of
from tandem.telemetry.hangs import Alarm, Beat, judge
from tandem.telemetry.messages import Heartbeat, checked, pack_samples, unpack_samples
from tandem.telemetry.registry import Registry
from tandem.timeouts import (
    CLOCK_SKEW_SECONDS,
    NODE_TICK_SECONDS,
    SHORTEST_HANG_SECONDS,
    STALE_SECONDS,
    STORE_RETRY_SECONDS,
    WATCHDOG_TICK_SECONDS,
)

log = logging.getLogger("tandem.watchdog")

NODES_AT_ONCE = 16
"""Whose metrics node 0 takes in at one look: all of 1,024 nodes within 13 s, before any is called stale."""
STOPPED, ENDED = ("T", "t"), ("Z", "X", "x")


@dataclass
class _Heard:
    """The last heartbeat of a rank here, or of all ranks of another node, and when it came (monotonic)."""

    beats: list[Beat]
    number: int
    at: float


@dataclass(frozen=True)
class _NodeWords:
    """What a node says of its ranks: a number that makes it new, their beats, and what its clock shows."""

    number: int
    beats: list[dict[str, Any]]
    time: float


class Watchdog:
    """One node's part. `hear` is called from any thread; the agent begins and ends generations.

    `registry` is this node's: what it alone knows goes to node 0 by the same way, where it is shown.
    `on_beats` is called on node 0, several times a second, with what is known of all ranks.
    """

    def __init__(
        self, node: int, node_name: str, port: int, connect: Callable[[], TCPStore], registry: Registry
    ) -> None:
        self._node, self._name, self._port, self._connect = node, node_name, port, connect
        self._registry = registry
        self._samples_heard: dict[int, tuple[bytes, float]] = {}
        self._there, self._turn = set[str](), 0  # keys that the store has; nodes whose metrics were read
        self._clocks_compared: set[int] = set()
        self._lock = threading.Lock()
        self._generation = ""
        self._pids: dict[int, int] = {}
        self._heartbeats: dict[int, _Heard] = {}
        self._nodes: dict[int, _Heard] = {}
        self._other_nodes: list[int] = []
        self._last_exchange: float | None = None  # None: not reached since it was last given up
        self._alarm: Alarm | None = None
        self.on_beats: Callable[[Sequence[Beat]], None] = lambda beats: None
        self.has_trained = False  # a rank here has finished a step of the last generation
        self.has_ever_trained = False  # or of one before
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"tandem-{work.__name__.strip('_')}", daemon=True)
            for work in (self._exchange, self._judge)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, store: TCPStore | None) -> None:
        """End; on node 0, where `store` is, after the last words of the others."""
        self._closing.set()
        if store is not None:
            with suppress(RuntimeError):
                self._read_samples(store, self._other_nodes)

    @property
    def alarm(self) -> Alarm | None:
        """The hang of the running generation, if there is one."""
        return self._alarm

    def begin_generation(self, generation: str, pids: Mapping[int, int], nodes: Sequence[int]) -> None:
        """Watch the ranks {rank: pid} of a generation from now on."""
        with self._lock:
            self._generation, self._pids, self._alarm = generation, dict(pids), None
            self._heartbeats, self._nodes, self.has_trained = {}, {}, False
            self._last_exchange = time.monotonic()  # the store has just answered the agent
            self._other_nodes = [node for node in nodes if node != self._node]

    def end_generation(self, store: TCPStore) -> None:
        """Nobody is to be missed until the next generation begins; node 0 hears that of the others."""
        if self._node != 0:
            with suppress(RuntimeError):
                self._tell_beats(store, self._generation, [])
                self._tell_samples(store)
        with self._lock:
            self._generation, self._alarm = "", None

    def hear(self, beat: Heartbeat) -> None:
        """A rank of this node said where it is."""
        with self._lock:
            if beat.rank in self._pids:
                here = Beat(**vars(beat), node=self._node, node_name=self._name)
                self._heartbeats[beat.rank] = _Heard([here], 0, time.monotonic())
                self.has_trained = self.has_trained or beat.trained
                self.has_ever_trained = self.has_ever_trained or beat.trained

    def _local_beats(self, now: float) -> list[Beat]:
        beats = []
        for rank, heard in self._heartbeats.items():
            silent = now - heard.at
            state = _process_state(self._pids.get(rank, 0)) if silent > 1.0 else "R"
            if state not in ENDED:  # the agent looks after those
                beats += [beat.later(silent, state in STOPPED) for beat in heard.beats]
        return beats

    def _remote_beats(self, now: float) -> list[Beat]:
        return [
            beat.later(now - heard.at, beat.halted or now - heard.at > beat.hang)
            for heard in self._nodes.values()
            for beat in heard.beats
        ]

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            now = time.monotonic()
            if now - last > 5 * WATCHDOG_TICK_SECONDS:
                self._forgive(now - last)
            last = now
            try:
                self._look(now)
            except Exception:  # without this thread no hang would ever be named
                log.exception("the watchdog could not judge; it looks again")
                self._closing.wait(STORE_RETRY_SECONDS)

    def _look(self, now: float) -> None:
        with self._lock:
            beats = self._local_beats(now) + self._remote_beats(now)
            if self._node == 0 and self._generation and self._alarm is None:
                self._alarm = judge(beats)
            limit = max((beat.hang for beat in beats), default=SHORTEST_HANG_SECONDS)
            since = self._last_exchange
            lost = self._node != 0 and since is not None and now - since > limit
            if lost:
                self._last_exchange = None
        if self._node == 0 and self._generation:
            self.on_beats(beats)
        if lost and since is not None:
            log.error("node 0 does not answer node %d since %.1f s", self._node, now - since)
            cut_connections(self._port)

    def _forgive(self, seconds: float) -> None:
        """This process itself was stopped: the time it slept is nobody's silence."""
        with self._lock:
            if self._last_exchange is not None:
                self._last_exchange += seconds
            for heard in (*self._heartbeats.values(), *self._nodes.values()):
                heard.at += seconds

    def _exchange(self) -> None:
        store: TCPStore | None = None
        known, told_at = False, 0.0  # before the first generation there may be no store
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            with self._lock:
                generation, others = self._generation, list(self._other_nodes)
                beats = [asdict(beat) for beat in self._local_beats(time.monotonic())]
                alarm = self._alarm
            known = known or bool(generation)
            if not known or (self._node == 0 and not others):
                continue
            try:
                store = store or self._connect()
                if self._node == 0:
                    self._read_others(store, generation, others, alarm)
                    self._turn %= len(others)
                    self._read_samples(store, others[self._turn : self._turn + NODES_AT_ONCE])
                    self._turn += NODES_AT_ONCE
                else:
                    self._tell_first(store, generation, beats)
                    if time.monotonic() - told_at > NODE_TICK_SECONDS:
                        told_at = time.monotonic()
                        self._tell_samples(store)
            except Exception as error:  # whatever a store that goes away raises; the judge counts the time
                log.debug("the store does not answer the watchdog: %s", error)
                store = None
                self._there.clear()
                self._closing.wait(STORE_RETRY_SECONDS)

    def _read_others(
        self, store: TCPStore, generation: str, others: Sequence[int], alarm: Alarm | None
    ) -> None:
        keys = {f"{generation}/pulse/{node}": node for node in others} if generation else {}
        for key, said in read_all(store, list(keys), self._there).items():
            node = keys[key]
            try:
                words = checked(_NodeWords, json.loads(said))
                beats = [checked(Beat, beat) for beat in words.beats]
            except (ValueError, RecursionError) as error:  # counts as silence
                log.debug("node %d says what is no heartbeat: %s", node, error)
                continue
            self._compare_clocks(node, words.time)
            heard = _Heard(beats, words.number, time.monotonic())
            with self._lock:
                before = self._nodes.get(node)
                if generation == self._generation and (before is None or before.number != heard.number):
                    self._nodes[node] = heard
        if alarm is not None:
            store.set(f"{generation}/alarm", json.dumps(asdict(alarm)))

    def _compare_clocks(self, node: int, theirs: float) -> None:
        """Say once that a node's clock differs: nothing here depends on it, but its log lines mislead."""
        if node not in self._clocks_compared:
            self._clocks_compared.add(node)
            if abs(skew := theirs - time.time()) > CLOCK_SKEW_SECONDS:
                text = "the clock of node %d is %.0f s %s node 0's; compare times in logs with care"
                log.warning(text, node, abs(skew), "ahead of" if skew > 0 else "behind")

    def _tell_first(self, store: TCPStore, generation: str, beats: list[dict[str, Any]]) -> None:
        key = f"{generation}/alarm"
        if generation:
            self._tell_beats(store, generation, beats)
        alarm = None
        with suppress(ValueError, RecursionError):  # what is no alarm is none
            alarm = checked(Alarm, json.loads(store.get(key))) if store.check([key]) else None
        with self._lock:
            self._last_exchange = time.monotonic()
            if generation == self._generation and alarm is not None:
                self._alarm = alarm

    def _tell_beats(self, store: TCPStore, generation: str, beats: list[dict[str, Any]]) -> None:
        words = _NodeWords(time.monotonic_ns(), beats, time.time())
        store.set(f"{generation}/pulse/{self._node}", json.dumps(asdict(words)))

    def _tell_samples(self, store: TCPStore) -> None:
        """Whether a generation runs or not: the last words of a run count too."""
        store.set(f"metrics/{self._node}", pack_samples(self._registry.own()))

    def _read_samples(self, store: TCPStore, others: Sequence[int]) -> None:
        """Show what other nodes say; gauges of a node that says nothing any more go."""
        now = time.monotonic()
        keys = {f"metrics/{node}": node for node in others}
        for key, said in read_all(store, list(keys), self._there).items():
            node, (before, at) = keys[key], self._samples_heard.get(keys[key], (b"", now))
            if said != before:
                self._samples_heard[node] = (said, now)
                differs = said.partition(b",")[2] != before.partition(b",")[2]  # behind what makes it new
                if differs or now - at > STALE_SECONDS:
                    self._registry.apply_node(node, unpack_samples(said))
            elif now - at > STALE_SECONDS:
                self._registry.forget_node(node)


def _process_state(pid: int) -> str:
    """The state letter of proc(5), which follows the name; "X" for a process that is gone."""
    return (stat_of(pid) or ["X"])[0]


def cut_connections(port: int) -> None:
    """Shut down this process's connections to `port`: a thread that reads from one gets an error at once."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
