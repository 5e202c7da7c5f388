"""Detect hangs: which rank, on which node, in which phase of which step, and for how long.

Ranks report their position to their agent (`heartbeat.py`), agents report to node 0 through the store, and
node 0's agent judges. None of this is in the path of a collective. Each part that may block has its own
thread:

    exchange    talks to the store: publishes this node's heartbeats, metrics and alarm
                (node 0: reads those of the other nodes)
    judge       checks the known heartbeats and never waits; on a node that cannot reach the store, it shuts
                down the connections to it, which wakes the agent from any blocked read

A step needs all ranks. So if the ranks that still send heartbeats finish steps, the ranks of a silent agent
do not hang. See docs/architecture.md#hangs.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import running_clock
from tandem.launch.rendezvous import cut_connections, read_all
from tandem.launch.workers import Workers, has_handler
from tandem.process import send, stat_of
from tandem.script.lifeline import STACKS
from tandem.telemetry import metrics
from tandem.telemetry.hangs import NOTHING_BEFORE, Alarm, Beat, find_hung_rank
from tandem.telemetry.messages import (
    Heartbeat,
    Message,
    Ranks,
    Samples,
    checked,
    pack_samples,
    unpack_samples,
)
from tandem.telemetry.meter import PHASES
from tandem.telemetry.registry import Registry
from tandem.telemetry.stacks import LAST_RESORT, stacks_file
from tandem.telemetry.stragglers import RankTimes, StragglerWatch
from tandem.timeouts import (
    CLOCK_SKEW_SECONDS,
    MONITOR_SECONDS,
    NO_ANSWER_SECONDS,
    NODE_TICK_SECONDS,
    SHORTEST_HANG_SECONDS,
    SLOW_RANKS_SECONDS,
    STACKS_SECONDS,
    STALE_SECONDS,
    STORE_READ_SECONDS,
    STORE_RETRY_SECONDS,
    WATCHDOG_TICK_SECONDS,
)

log = logging.getLogger("tandem.watchdog")

# Request stacks from the ranks of a node that hangs, and report which ranks have written them.


def gather_stacks(workers: Workers, ranks: Mapping[int, int], log_folder: Path) -> str:
    """Have the ranks {local rank: rank} write their stacks; return a sentence about the files."""
    pids = workers.pids()
    began = time.monotonic()
    asks_again = True
    files = {each: stacks_file(log_folder, ranks[each]) for each in pids}
    sizes = {each: size_of(path) for each, path in files.items()}
    for pid in pids.values():
        workers.tell(pid, STACKS)  # a program that is not Python ignores this
    silent = sorted(pids)
    while (waited := time.monotonic() - began) < STACKS_SECONDS:
        silent = [each for each in silent if size_of(files[each]) <= sizes[each]]
        if waited > NO_ANSWER_SECONDS and all(_is_stopped(pids[each]) for each in silent):
            break  # not earlier: ranks write torch's flight recorder by themselves
        # Python's handler does not run while the main thread is blocked in C; the handler in C does.
        if waited > NO_ANSWER_SECONDS and asks_again:
            asks_again = False
            send(LAST_RESORT, [pids[each] for each in silent if has_handler(pids[each], LAST_RESORT)])
        time.sleep(MONITOR_SECONDS)
    written = [str(files[each]) for each in pids if each not in silent]
    without = [f"rank {ranks[each]}{' (stopped)' if _is_stopped(pids[each]) else ''}" for each in silent]
    words = [f"stacks are in {', '.join(written)}"] if written else []
    return "; ".join([*words, f"no stacks from {', '.join(without)}"] if without else words)


def size_of(path: Path) -> int:
    """Return the size of a file, or -1 if it does not exist."""
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _is_stopped(pid: int) -> bool:
    return stat_of(pid)[:1] in (["T"], ["t"])


# On node 0, find the rank that slows down a script, from the ranks' heartbeats.
#
# A task's ranks exchange their times in a collective (`telemetry/stragglers.py`); a script's collectives are
# its own. See docs/architecture.md#measuring-a-ranks-own-time.


class SlowRanks:
    """Report the times of all ranks to `tell`, and a straggler to the log and to `event`.

    The ranks are compared every `pause` seconds.
    """

    def __init__(
        self,
        tell: Callable[[Message], object],
        event: Callable[..., object],
        pause: float = SLOW_RANKS_SECONDS,
    ) -> None:
        self._pause = pause
        self._tell = tell
        self._event = event
        self._watch = StragglerWatch()
        self._looked_at = 0.0

    def look(self, beats: Sequence[Beat]) -> None:
        """Compare the ranks if it is time to; do nothing if they train a task."""
        if time.monotonic() - self._looked_at < self._pause:
            return
        known = {beat.rank: beat for beat in beats if beat.own is not None and beat.quick is not None}
        if len(known) < 2 or len(known) < len(beats):
            return
        now = time.monotonic()
        seconds = now - self._looked_at
        self._looked_at = now
        report = self._watch.report([_times(beat, seconds) for _, beat in sorted(known.items())])
        unknown = metrics.RANK_DATA_SECONDS.name, metrics.TYPICAL_STEP_SECONDS.name
        self._tell(Samples([each for each in report.samples if each.name not in unknown]))
        rows = [{**row, "phases_ms": {"other": row["own_ms"]}} for row in report.page.rows]
        self._tell(Ranks(rows, report.page.says))
        if report.new_straggler is not None:
            log.warning("%s", report.new_straggler)
            self._event("straggler", **report.new_straggler.facts())


def _times(beat: Beat, seconds: float) -> RankTimes:
    own = beat.own or 0.0
    quick = beat.quick or 0.0
    phases = tuple(own if name == "other" else 0.0 for name in PHASES)
    # A script's rank does not report the time of a whole step, which is at least its own time.
    return RankTimes(beat.rank, beat.node, own, quick, own, seconds, phases, beat.doing or "")


NO_NODE = -1
NODES_AT_ONCE = 16
"""Number of nodes whose metrics node 0 reads at once: 1,024 nodes within 13 s, before any is stale."""
STOPPED = ("T", "t")
ENDED = ("Z", "X", "x")


@dataclass
class _Heard:
    """The last heartbeat of a local rank, or of all ranks of another node, and when it arrived.

    Times are seconds of `running_clock.now`. `used`: CPU time of a silent rank, measured at `looked_at`.
    """

    beats: list[Beat]
    number: int
    at: float
    used: int = 0
    looked_at: float = 0.0
    worked_at: float = 0.0

    def look(self, ticks: int, now: float) -> None:
        """Record the CPU time of a silent rank, in clock ticks: while it grows, the rank computes."""
        if now - self.looked_at > NODE_TICK_SECONDS:
            if self.looked_at and ticks > self.used:
                self.worked_at = now
            self.used = ticks
            self.looked_at = now


@dataclass(frozen=True)
class _NodeBeats:
    """A node's report of its ranks: a number that changes with each report, the beats, and its wall clock."""

    number: int
    beats: list[dict[str, Any]]
    time: float


class Watchdog:
    """One node's part of hang detection.

    `record_heartbeat` may be called from any thread; the agent begins and ends generations. `registry`: this
    node's metrics, which go to node 0 the same way. On node 0, `on_beats` is called several times a second
    with the heartbeats of all ranks; on other nodes, `on_exchange` is called as often with the store.
    """

    def __init__(
        self, node: int, node_name: str, port: int, connect: Callable[[], TCPStore], registry: Registry
    ) -> None:
        self._node = node
        self._name = node_name
        self._port = port
        self._connect = connect
        self._registry = registry
        self._samples_heard: dict[int, tuple[bytes, float]] = {}
        # Keys that exist in the store, and where the next read of metrics begins.
        self._known_keys = set[str]()
        self._turn = 0
        self._clocks_compared: set[int] = set()
        self._lock = threading.Lock()
        self._generation = ""
        self._pids: dict[int, int] = {}
        self._heartbeats: dict[int, _Heard] = {}
        self._nodes: dict[int, _Heard] = {}
        self._other_nodes: list[int] = []
        self._last_exchange: float | None = None  # None: no answer since the connection was last given up
        self._advanced_at = 0.0  # when a rank that still sends heartbeats last finished a step
        self._unheard = set[int]()  # nodes whose agents are silent while their ranks train
        self._past = NOTHING_BEFORE
        self._alarm: Alarm | None = None
        self.on_beats: Callable[[Sequence[Beat]], None] = lambda beats: None
        self.on_exchange: Callable[[TCPStore], None] = lambda store: None
        self.is_master_frozen: Callable[[], bool] = lambda: False
        self.has_trained = False  # a rank here has finished a step of the last generation
        self.has_ever_trained = False  # or of an earlier one
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"tandem-{work.__name__.strip('_')}", daemon=True)
            for work in (self._exchange, self._judge)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, store: TCPStore | None) -> None:
        """Stop; on node 0, where `store` is set, read the last metrics of the other nodes first."""
        self._closing.set()
        if store is not None:
            with suppress(RuntimeError):
                self._read_samples(store, self._other_nodes)

    def take_place(self, node: int) -> None:
        """Report as this node of the job from now on."""
        with self._lock:
            self._node = node

    def resign(self) -> None:
        """Report and judge nothing until `take_place`: this node waits as a spare."""
        with self._lock:
            self._node = NO_NODE
            self._generation = ""
            self._last_exchange = None

    @property
    def alarm(self) -> Alarm | None:
        """The hang of the running generation, if there is one."""
        return self._alarm

    def begin_generation(self, generation: str, pids: Mapping[int, int], nodes: Sequence[int]) -> None:
        """Watch the ranks {rank: pid} of a generation from now on."""
        with self._lock:
            self._generation = generation
            self._pids = dict(pids)
            self._alarm = None
            self._heartbeats = {}
            self._nodes = {}
            self.has_trained = False
            self._advanced_at = 0.0
            self._unheard = set()
            self._last_exchange = running_clock.now()  # the agent has just used the store
            self._other_nodes = [node for node in nodes if node != self._node]

    def end_generation(self, store: TCPStore) -> None:
        """Suspend hang detection between generations, and tell node 0 so."""
        if self._node != 0:
            with suppress(RuntimeError):
                # Without beats, node 0 cannot take the silence of ended ranks for a hang.
                self._tell_beats(store, self._generation, [])
                self._tell_samples(store)
        with self._lock:
            heard = (*self._heartbeats.values(), *self._nodes.values())
            self._past = self._past.after(self._alarm, [beat for each in heard for beat in each.beats])
            self._generation = ""
            self._alarm = None

    def record_heartbeat(self, beat: Heartbeat) -> None:
        """Record a heartbeat of a rank of this node."""
        with self._lock:
            if beat.rank in self._pids:
                here = Beat(**vars(beat), node=self._node, node_name=self._name)
                heard = _Heard([here], 0, running_clock.now())
                self._note_steps(self._heartbeats.get(beat.rank), heard)
                self._heartbeats[beat.rank] = heard
                self.has_trained = self.has_trained or beat.trained
                self.has_ever_trained = self.has_ever_trained or beat.trained

    def _note_steps(self, before: _Heard | None, heard: _Heard) -> None:
        # Only a step later than the last one counts: a heartbeat alone is no progress.
        steps = {beat.rank: beat.step for beat in before.beats} if before is not None else {}
        for beat in heard.beats:
            if beat.step > steps.get(beat.rank, beat.step):
                self._advanced_at = max(self._advanced_at, heard.at - beat.quiet)

    def _local_beats(self, now: float) -> list[Beat]:
        beats = []
        for rank, heard in self._heartbeats.items():
            silent = now - heard.at
            state = "R"
            # A rank that cannot send heartbeats may still compute, for example in a C call that holds the
            # GIL.
            if silent > 1.0:
                state, *more = stat_of(self._pids.get(rank, 0)) or ["X"]
                # utime and stime, fields 14 and 15 of proc(5).
                heard.look(sum(map(int, more[10:12])), now)
            if state not in ENDED:  # the agent handles ranks that have ended
                idle = now - max(heard.at, heard.worked_at)
                beats += [beat.later(silent, idle, state in STOPPED) for beat in heard.beats]
        return beats

    def _remote_beats(self, now: float) -> list[Beat]:
        beats = []
        for heard in self._nodes.values():
            # While any rank finishes steps, every rank takes part in them, heard or not.
            silent = now - max(heard.at, self._advanced_at)
            beats += [beat.later(silent, silent, beat.halted or silent > beat.hang) for beat in heard.beats]
        return beats

    def _judge(self) -> None:
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            try:
                self._look(running_clock.now())
            except Exception:  # without this thread, no hang would be detected
                log.exception("hang detection failed; retrying")
                self._closing.wait(STORE_RETRY_SECONDS)

    def _look(self, now: float) -> None:
        with self._lock:
            beats = self._local_beats(now) + self._remote_beats(now)
            if self._node == 0 and self._generation and self._alarm is None:
                self._alarm = find_hung_rank(beats, self._past)
            limit = max((beat.hang for beat in beats), default=SHORTEST_HANG_SECONDS)
            since = self._last_exchange
            # Silence does not count while ranks here finish steps, which also need the ranks of node 0.
            silence = now - max(since or now, self._advanced_at) if self._node != 0 else 0.0
            # Start the probe early, so that its answer arrives in time.
            is_frozen = silence > limit / 2 and self.is_master_frozen()
            lost = silence > (max(limit, STORE_READ_SECONDS) if is_frozen else limit)
            if lost:
                # Reports and cuts once per silence; the next answer starts the clock again.
                self._last_exchange = None
            heard_at = {node: heard.at for node, heard in self._nodes.items()}
            if self._node != 0 and since is not None and not lost:
                heard_at[0] = since
            silent = {node: now - at for node, at in heard_at.items() if now - at > limit}
            # A hang explains the silence, and between generations nothing is expected.
            silent = {} if self._alarm is not None or not self._generation else silent
        if self._node == 0 and self._generation:
            self.on_beats(beats)
        waits = f"it seems frozen, waiting for up to {STORE_READ_SECONDS:.0f} s"
        known = waits if silence > limit else "its ranks are still training"
        self._log_silent_nodes(silent, known)
        if lost and since is not None:
            log.error("node %d has had no answer from node 0 for %.1f s", self._node, now - since)
            cut_connections(self._port)

    def _log_silent_nodes(self, silent: Mapping[int, float], known: str) -> None:
        """Log once per agent that it is silent (which is no hang of its ranks), or that it sends again."""
        for node in sorted(silent.keys() - self._unheard):
            text = "node %d's agent has sent no heartbeat for %.1f s; %s"
            log.warning(text, node, silent[node], known)
        for node in sorted(self._unheard - silent.keys()):
            log.info("node %d's agent sends heartbeats again", node)
        self._unheard = set(silent)

    def _exchange(self) -> None:
        store: TCPStore | None = None
        known = False  # before the first generation there may be no store
        told_at = 0.0
        while not self._closing.wait(WATCHDOG_TICK_SECONDS):
            with self._lock:
                generation = self._generation
                others = list(self._other_nodes)
                beats = [asdict(beat) for beat in self._local_beats(running_clock.now())]
                alarm = self._alarm
            known = known or bool(generation)
            if not known or self._node == NO_NODE or (self._node == 0 and not others):
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
                    self.on_exchange(store)
                    if running_clock.now() - told_at > NODE_TICK_SECONDS:
                        told_at = running_clock.now()
                        self._tell_samples(store)
            except Exception as error:  # a lost store raises many types; the judge measures the time
                log.debug("the store does not answer the watchdog: %s", error)
                store = None
                self._known_keys.clear()
                self._closing.wait(STORE_RETRY_SECONDS)

    def _read_others(
        self, store: TCPStore, generation: str, others: Sequence[int], alarm: Alarm | None
    ) -> None:
        keys = {f"{generation}/pulse/{node}": node for node in others} if generation else {}
        for key, value in read_all(store, list(keys), self._known_keys).items():
            node = keys[key]
            try:
                words = checked(_NodeBeats, json.loads(value))
                beats = [checked(Beat, beat) for beat in words.beats]
            except (ValueError, RecursionError) as error:  # counts as silence
                log.debug("node %d says what is no heartbeat: %s", node, error)
                continue
            self._compare_clocks(node, words.time)
            heard = _Heard(beats, words.number, running_clock.now())
            with self._lock:
                before = self._nodes.get(node)
                # The store keeps the last report of a silent node, so only a new number is a heartbeat. The
                # agent may have begun another generation during the read.
                if generation == self._generation and (before is None or before.number != heard.number):
                    self._note_steps(before, heard)
                    self._nodes[node] = heard
        if alarm is not None:
            store.set(f"{generation}/alarm", json.dumps(asdict(alarm)))

    def _compare_clocks(self, node: int, theirs: float) -> None:
        """Log once that a node's clock differs. Nothing here depends on it, but times in logs mislead."""
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
        with suppress(ValueError, RecursionError):  # an invalid alarm counts as none
            alarm = checked(Alarm, json.loads(store.get(key))) if store.check([key]) else None
        with self._lock:
            self._last_exchange = running_clock.now()
            if generation == self._generation and alarm is not None:
                self._alarm = alarm

    def _tell_beats(self, store: TCPStore, generation: str, beats: list[dict[str, Any]]) -> None:
        words = _NodeBeats(time.monotonic_ns(), beats, time.time())
        store.set(f"{generation}/pulse/{self._node}", json.dumps(asdict(words)))

    def _tell_samples(self, store: TCPStore) -> None:
        """Publish this node's metrics, also between generations, so that the last values are not lost."""
        store.set(f"metrics/{self._node}", pack_samples(self._registry.node_samples()))

    def _read_samples(self, store: TCPStore, others: Sequence[int]) -> None:
        """Apply the metrics of other nodes, and remove the gauges of a node that is silent."""
        now = running_clock.now()
        keys = {f"metrics/{node}": node for node in others}
        for key, value in read_all(store, list(keys), self._known_keys).items():
            node, (before, at) = keys[key], self._samples_heard.get(keys[key], (b"", now))
            if value != before:
                self._samples_heard[node] = (value, now)
                # A counter that makes each report new precedes the comma.
                differs = value.partition(b",")[2] != before.partition(b",")[2]
                if differs or now - at > STALE_SECONDS:
                    self._registry.apply_node(node, unpack_samples(value))
            elif now - at > STALE_SECONDS:
                self._registry.forget_node(node)
