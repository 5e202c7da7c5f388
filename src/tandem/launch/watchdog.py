"""Hangs, by name: which rank, on which node, in which phase of which step, and since when.

Ranks tell their agent where they are (`heartbeat.py`); agents tell node 0 through the store; node 0's agent
judges. None of this is in the path of a collective, and each part that may block has a thread of its own:

    exchange    talks with the store: publishes this node's ranks (node 0: reads the others'), and the alarm
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

from tandem.telemetry.clock import STEP_PHASES
from tandem.timeouts import SHORTEST_HANG_SECONDS, STORE_RETRY_SECONDS, WATCHDOG_TICK_SECONDS

log = logging.getLogger("tandem.watchdog")

STOPPED, ENDED = ("T", "t"), ("Z", "X", "x")


@dataclass(frozen=True)
class Beat:
    """What is known of a rank. `quiet`: seconds since it last entered a phase; `silent`: since it was heard.

    `limit` is what its phase may take, `hang` what a training phase may. `halted`: it cannot be heard,
    because its process is stopped or its node is unreachable.
    """

    rank: int
    node: int
    node_name: str
    step: int
    phase: str
    quiet: float
    silent: float
    limit: float
    hang: float
    waiting: bool
    halted: bool


@dataclass(frozen=True)
class Alarm:
    """A hang: the rank that holds the others up, and the line that says so."""

    rank: int
    node: int
    phase: str
    step: int
    seconds: float
    text: str


def judge(beats: Sequence[Beat]) -> Alarm | None:
    """The rank that holds up the world, or None as long as nobody is overdue.

    1. Somebody cannot be heard for longer than a hang: that rank.
    2. Somebody is not in a collective: the others wait for it. Overdue, it is named; until then all is well.
    3. All stand in collectives for longer than they may: they stand in different ones. Named is the rank that
       is out of line with most; of two, the one that is ahead, because it left one out.
    """
    gone = [beat for beat in beats if beat.halted and beat.silent > beat.hang]
    if gone:
        first = max(gone, key=lambda beat: (beat.silent, -beat.rank))
        return _alarm(first, first.silent, "cannot be heard")
    busy = [beat for beat in beats if not beat.waiting]
    if busy:
        overdue = [beat for beat in busy if beat.quiet > beat.limit]
        if not overdue:
            return None
        last = min(overdue, key=lambda beat: (beat.step, -beat.quiet))
        return _alarm(last, last.quiet, "does not get on")
    if not beats or any(beat.quiet <= beat.limit for beat in beats):
        return None
    places = [(beat.step, _order(beat.phase)) for beat in beats]
    odd = min(
        beats,
        key=lambda beat: (places.count((beat.step, _order(beat.phase))), -beat.step, -_order(beat.phase)),
    )
    return _alarm(odd, odd.quiet, "waits in another collective than the others")


def _order(phase: str) -> int:
    return STEP_PHASES.index(phase) if phase in STEP_PHASES else len(STEP_PHASES)


def _alarm(beat: Beat, seconds: float, what: str) -> Alarm:
    text = (
        f"hang: rank {beat.rank} on node {beat.node} ({beat.node_name}) {what} since {seconds:.1f} s, "
        f"in phase {beat.phase} of step {beat.step}"
    )
    return Alarm(beat.rank, beat.node, beat.phase, beat.step, round(seconds, 1), text)


@dataclass
class _Heard:
    """The last heartbeat of a rank, or the last words of a node, and when they came (monotonic seconds)."""

    words: dict[str, Any]
    at: float


class Watchdog:
    """One node's part. `hear` is called from any thread; the agent opens and closes worlds."""

    def __init__(self, node: int, node_name: str, port: int, connect: Callable[[], TCPStore]) -> None:
        self._node, self._name, self._port, self._connect = node, node_name, port, connect
        self._lock = threading.Lock()
        self._world = ""
        self._pids: dict[int, int] = {}
        self._heartbeats: dict[int, _Heard] = {}
        self._nodes: dict[int, _Heard] = {}
        self._other_nodes: list[int] = []
        self._last_exchange: float | None = None  # None: not reached since it was last given up
        self._alarm: Alarm | None = None
        self.has_trained = False  # a rank here has finished a step of the last world
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"tandem-{work.__name__.strip('_')}", daemon=True)
            for work in (self._exchange, self._judge)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closing.set()

    @property
    def alarm(self) -> Alarm | None:
        """The hang of the running world, if there is one."""
        return self._alarm

    def open_world(self, world: str, pids: Mapping[int, int], nodes: Sequence[int]) -> None:
        """Watch the ranks {rank: pid} of a world from now on."""
        with self._lock:
            self._world, self._pids, self._alarm = world, dict(pids), None
            self._heartbeats, self._nodes, self.has_trained = {}, {}, False
            self._other_nodes = [node for node in nodes if node != self._node]

    def close_world(self, store: TCPStore) -> None:
        """Nobody is to be missed until the next world opens; node 0 hears that of the others."""
        if self._node != 0:
            with suppress(RuntimeError):
                words = {"number": time.monotonic_ns(), "beats": []}
                store.set(f"{self._world}/pulse/{self._node}", json.dumps(words))
        with self._lock:
            self._world, self._alarm = "", None

    def hear(self, beat: Mapping[str, Any]) -> None:
        """A rank of this node said where it is."""
        with self._lock:
            if int(beat["rank"]) in self._pids:
                self._heartbeats[int(beat["rank"])] = _Heard(dict(beat), time.monotonic())
                self.has_trained = self.has_trained or bool(beat["trained"])

    def _local_beats(self, now: float) -> list[Beat]:
        beats = []
        for rank, heard in self._heartbeats.items():
            words, silent = heard.words, now - heard.at
            state = _process_state(self._pids.get(rank, 0)) if silent > 1.0 else "R"
            if state in ENDED:  # the agent looks after those
                continue
            beats.append(
                Beat(
                    rank=rank,
                    node=self._node,
                    node_name=self._name,
                    step=int(words["step"]),
                    phase=str(words["phase"]),
                    quiet=float(words["quiet"]) + silent,
                    silent=silent,
                    limit=float(words["limit"]),
                    hang=float(words["hang"]),
                    waiting=bool(words["waiting"]),
                    halted=state in STOPPED,
                )
            )
        return beats

    def _remote_beats(self, now: float) -> list[Beat]:
        beats = []
        for heard in self._nodes.values():
            silent = now - heard.at
            for words in heard.words["beats"]:
                beat = Beat(**words)
                beats.append(
                    Beat(
                        **{
                            **words,
                            "quiet": beat.quiet + silent,
                            "silent": beat.silent + silent,
                            "halted": beat.halted or silent > beat.hang,
                        }
                    )
                )
        return beats

    def _judge(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            now = time.monotonic()
            if now - last > 5 * WATCHDOG_TICK_SECONDS:
                self._forgive(now - last)
            last = now
            with self._lock:
                beats = self._local_beats(now) + self._remote_beats(now)
                if self._node == 0 and self._world and self._alarm is None:
                    self._alarm = judge(beats)
                limit = max((beat.hang for beat in beats), default=SHORTEST_HANG_SECONDS)
                since = self._last_exchange
                lost = self._node != 0 and since is not None and now - since > limit
                if lost:
                    self._last_exchange = None
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
        known = False  # before the first world there may be no store
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            with self._lock:
                world, others = self._world, list(self._other_nodes)
                beats = [asdict(beat) for beat in self._local_beats(time.monotonic())]
                alarm = self._alarm
            known = known or bool(world)
            if not known or (self._node == 0 and not (world and others)):
                continue
            try:
                store = store or self._connect()
                if self._node == 0:
                    self._read_others(store, world, others, alarm)
                else:
                    self._tell_first(store, world, beats)
            except Exception as error:  # whatever a store that goes away raises; the judge counts the time
                log.debug("the store does not answer the watchdog: %s", error)
                store = None
                self._closing.wait(STORE_RETRY_SECONDS)

    def _read_others(self, store: TCPStore, world: str, others: Sequence[int], alarm: Alarm | None) -> None:
        for node in others:
            key = f"{world}/pulse/{node}"
            if store.check([key]):
                words = json.loads(store.get(key))
                with self._lock:
                    before = self._nodes.get(node)
                    if world == self._world and (before is None or before.words["number"] != words["number"]):
                        self._nodes[node] = _Heard(words, time.monotonic())
        if alarm is not None:
            store.set(f"{world}/alarm", json.dumps(asdict(alarm)))

    def _tell_first(self, store: TCPStore, world: str, beats: list[dict[str, Any]]) -> None:
        key = f"{world}/alarm"
        if world:
            words = {"number": time.monotonic_ns(), "beats": beats}
            store.set(f"{world}/pulse/{self._node}", json.dumps(words))
        alarm = Alarm(**json.loads(store.get(key))) if store.check([key]) else None
        with self._lock:
            self._last_exchange = time.monotonic()
            if world == self._world and alarm is not None:
                self._alarm = alarm


def _process_state(pid: int) -> str:
    """The state letter of proc(5), which follows the name; "X" for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


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
