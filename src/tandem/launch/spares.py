"""Implement `--spares N`: further nodes wait, and one of them takes the place of a lost node at once.

Every node but node 0 reports several times a second to the agents' store that its agent lives. Node 0 assigns
the places of the world (`places.py`) and writes them there. A node joins the rendezvous only while it has a
place; without one it waits, with its fork server and the processes of its ranks warm. To torch's rendezvous,
the number of nodes is fixed. See docs/architecture.md#spares.

In an elastic job, every node has a place, until its ranks compute wrongly.
"""

import contextlib
import json
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, replace

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import running_clock
from tandem.errors import FINISHED, STOPPED
from tandem.launch.node_context import NodeContext
from tandem.launch.places import (  # fmt: skip
    COMPUTES_WRONGLY,
    MOST_FAILURES,
    NO_PLACE,
    NodeReport,
    PlaceTable,
    Reassignment,
    from_text,
    report_from,
    to_text,
)
from tandem.launch.rendezvous import (
    END_KEY,
    LEFT_KEY,
    JobEndedError,
    StopRequestedError,
    StoreLostError,
    is_confirmed,
    job_end_in,
    read_all,
)
from tandem.launch.rendezvous_state import poll_intervals
from tandem.launch.watchdog import Watchdog
from tandem.platforms.detection import Placement
from tandem.process import boot_id
from tandem.timeouts import (
    FIRST_CALL_SECONDS,
    KEEP_ALIVE_ATTEMPTS,
    MEMBERSHIP_SECONDS,
    SPARE_BEAT_SECONDS,
    SPARE_BEATS_MISSED,
    SPARE_TAKES_SECONDS,
    SPARE_WARM_SECONDS,
    SPARES_LEAVE_SECONDS,
    STANDBY_SECONDS,
    STORE_RETRY_SECONDS,
)

log = logging.getLogger("tandem.agent")

PLACES_KEY = "tandem/places"
SPARES_LEFT_KEY = "tandem/spares/left"


class PlaceLostError(Exception):
    """This node has no place any more; in a job with spares, it becomes a spare."""


class Places:
    """Places in a job of a fixed number of nodes: each keeps the one that it was started with."""

    is_joining = False
    """Whether this node's agent waits in the rendezvous for the others."""

    def joins(self) -> None:
        """Record that this node's agent is about to join the rendezvous."""
        self.is_joining = True

    def has_joined(self) -> None:
        """Record that a generation has started."""
        self.is_joining = False

    def wait_for_place(self, node: NodeContext, store: TCPStore, watchdog: Watchdog) -> NodeContext:
        """Wait until this node has a place; return its context with that node rank."""
        return node

    def check(self, store: TCPStore) -> None:
        """Raise PlaceLostError if this node has no place any more."""

    def address(self, placement: Placement) -> str:
        """Return the name of this node in the rendezvous.

        The engine orders nodes by this text. The node rank in front keeps rank 0 on node 0.
        """
        return f"{placement.node_rank:06d}.{placement.local_name}"

    def is_gone(self, address: str) -> bool:
        """Return whether the node with this name in the rendezvous has lost its place."""
        return False

    def charge(self, store: TCPStore) -> None:
        """Record a failure of this node's own ranks."""

    def give_up(self, store: TCPStore) -> bool:
        """Give up this node's place, because its ranks compute wrongly; return whether the job continues.

        With spares, another node has to take the place within a limit.
        """
        return False

    def end(self, store: TCPStore | None) -> None:
        """Stop; on node 0, whose store this is, first let the spares read how the job ended."""


class ElasticPlace(Places):
    """The place of a node in an elastic job, which it loses only if its ranks compute wrongly.

    It then waits for the end of the job, whose exit code it returns: a platform would restart a node that
    exits with another code, or end the job. A restarted agent on the same machine waits as well.
    """

    def __init__(self, node: NodeContext) -> None:
        self._key = f"tandem/left-out/{node.placement.node_rank}/{boot_id()}"
        self._is_out = False

    def check(self, store: TCPStore) -> None:
        if self._is_out:
            raise PlaceLostError

    def give_up(self, store: TCPStore) -> bool:
        self._is_out = True
        # A lost store shows at the next poll, and `wait_for_place` repeats this.
        with contextlib.suppress(RuntimeError):
            store.set(self._key, "1")
        return True

    def wait_for_place(self, node: NodeContext, store: TCPStore, watchdog: Watchdog) -> NodeContext:
        """Return the node, or wait until the job ends if this node was left out.

        Raises JobEndedError, StopRequestedError, StoreLostError.
        """
        try:
            self._is_out = self._is_out or bool(store.check([self._key]))
            if not self._is_out:
                return node
            store.set(self._key, "1")  # a restarted node 0 has a new store
        except RuntimeError as error:
            raise StoreLostError from error
        watchdog.resign()
        node.workers.end_standby()
        log.warning(
            "node %d stays out of this job, because its ranks computed wrongly: test or replace this machine",
            node.placement.node_rank,
        )
        while True:
            try:
                _raise_if_over(node, store, is_confirmed)
            except JobEndedError as result:
                if not node.stop:
                    log.info("the job has ended with code %d; this node stayed out of it", result.code)
                with contextlib.suppress(RuntimeError):
                    store.add(LEFT_KEY, 1)
                raise
            node.view.waits_as_spare()
            time.sleep(MEMBERSHIP_SECONDS)


class OwnPlace(Places):
    """The place of a node other than node 0, in a job with spares; one object for the whole launch.

    A thread reports to node 0 that this agent is alive.
    """

    def __init__(self, node: NodeContext, on_place: Callable[[int], None]) -> None:
        self._number = node.placement.node_rank
        self._on_place = on_place
        self._token = uuid.uuid4().hex
        self._pause = _pause(node.placement)
        self._place = NO_PLACE
        self._waits = False
        self._has_run = False
        self._connect = node.endpoint.connect
        self._closing = threading.Event()
        self._is_joined = threading.Event()
        threading.Thread(target=self._report, name="tandem-spares", daemon=True).start()

    def has_joined(self) -> None:
        super().has_joined()
        self._has_run = True

    def wait_for_place(self, node: NodeContext, store: TCPStore, watchdog: Watchdog) -> NodeContext:
        """Wait until node 0 gives this node a place.

        Raises JobEndedError, StopRequestedError, StoreLostError.
        """
        self._waits = True
        self._is_joined.set()
        try:
            place = self._wait(node, store, watchdog)
        except JobEndedError:
            with contextlib.suppress(RuntimeError):
                store.add(SPARES_LEFT_KEY, 1)
            raise
        self._place = place
        self._waits = False
        watchdog.take_place(place)
        self._on_place(place)
        node.view.rejoining()
        return replace(node, placement=replace(node.placement, node_rank=place))

    def _wait(self, node: NodeContext, store: TCPStore, watchdog: Watchdog) -> int:
        since = running_clock.now()
        has_said = False
        next_fork = since + SPARE_WARM_SECONDS
        while True:
            place = self._held(store)
            if place is not None:
                if has_said or place != self._number:
                    log.info("node %d takes the place of node %d", self._number, place)
                return place
            now = running_clock.now()
            _raise_if_over(node, store, _has_ended)
            if not has_said and now - since > self._pause * SPARE_BEATS_MISSED:
                has_said = True
                watchdog.resign()
                log.info("node %d waits as a spare", self._number)
            node.view.waits_as_spare()
            # Not at once: the ranks of a generation that starts need the cores.
            if has_said and now > next_fork:
                next_fork = now + STANDBY_SECONDS
                node.workers.start_standby(node.nproc)
            time.sleep(self._pause)

    def check(self, store: TCPStore) -> None:
        if self._held(store) is None:
            raise PlaceLostError

    def _held(self, store: TCPStore) -> int | None:
        """Return the place that this node has. Raises StoreLostError."""
        try:
            holders = from_text(store.get(PLACES_KEY)) if store.check([PLACES_KEY]) else {}
        except (RuntimeError, ValueError) as error:
            raise StoreLostError from error
        mine = (self._number, self._token)
        place = next((place for place, holder in holders.items() if holder == mine), None)
        if place is None and self._place in holders:
            # After a restart of node 0, the place counts as a claim until another node has it.
            self._place = NO_PLACE
        return place

    def address(self, placement: Placement) -> str:
        # The token distinguishes it from the lost node, whose name in the rendezvous lives for seconds.
        return f"{super().address(placement)}.{self._token}"

    def charge(self, store: TCPStore) -> None:
        with contextlib.suppress(RuntimeError):
            failures = store.add(_failures(self._number), 1)
            # Node 0 decides now; if this node joined first, all ranks would have to restart twice.
            deadline = running_clock.now() + self._pause * SPARE_BEATS_MISSED
            while failures >= MOST_FAILURES and running_clock.now() < deadline:
                if self._held(store) is None:
                    return
                time.sleep(self._pause)

    def give_up(self, store: TCPStore) -> bool:
        with contextlib.suppress(RuntimeError):
            store.add(_failures(self._number), COMPUTES_WRONGLY)
            deadline = running_clock.now() + SPARE_TAKES_SECONDS
            while running_clock.now() < deadline:
                if self._held(store) is None:
                    return True
                time.sleep(self._pause)
        return False

    def end(self, store: TCPStore | None) -> None:
        self._closing.set()

    def _report(self) -> None:
        store: TCPStore | None = None
        self._is_joined.wait()
        while not self._closing.wait(self._pause):
            report = NodeReport(time.monotonic_ns(), self._token, self._place, self._waits, self._has_run)
            try:
                store = store or self._connect()
                store.set(_report_key(self._number), json.dumps(asdict(report)))
            except Exception as error:  # a lost store raises many types, and this node rejoins it
                log.debug("the store does not answer: %s", error)
                store = None
                self._closing.wait(STORE_RETRY_SECONDS)


def _has_ended(store: TCPStore) -> bool:
    return bool(store.check([END_KEY]))


def _raise_if_over(node: NodeContext, store: TCPStore, is_final: Callable[[TCPStore], bool]) -> None:
    """Raise the error that ends a waiting node: the job has a result, or a stop was requested.

    `is_final`: whether a success is certain. Raises JobEndedError, StopRequestedError, StoreLostError.
    """
    result = job_end_in(store)
    try:
        if result is not None and (result.code != FINISHED or is_final(store)):
            raise result
        if not node.stop:
            return
        if node.stop.interrupts > 1 or store.add(LEFT_KEY, 0) >= node.placement.nodes:
            raise StopRequestedError  # the others had nothing to save either
    except RuntimeError as error:
        # A stop, or an error before the start, whose result this node was too late to read.
        if node.stop:
            raise StopRequestedError from error
        raise result if result is not None else StoreLostError() from error
    # The scheduler stops either the whole job, whose result is soon there, or only this node.
    if running_clock.now() - (node.stop.at or 0.0) > node.config.shutdown_timeout:
        reason = f"stopped by {node.stop.name} while it waited without a place; the job continues"
        log.info("%s", reason)
        raise JobEndedError(STOPPED, reason)


class AllPlaces(Places):
    """Assign all places, in a thread on node 0; one object for the whole launch."""

    def __init__(self, node: NodeContext) -> None:
        self._view = node.view
        self._connect: Callable[[], TCPStore] = node.endpoint.connect
        self._pause = pause = _pause(node.placement)
        pace = poll_intervals(node.placement.nodes + node.placement.spares)
        self._long_silence = float(pace.alive_seconds * KEEP_ALIVE_ATTEMPTS)
        self._table = PlaceTable(
            node.placement.nodes,
            node.placement.spares,
            pause * SPARE_BEATS_MISSED,
            self._long_silence,
            FIRST_CALL_SECONDS,
            running_clock.now(),
        )
        self._tokens = dict[int, str]()  # of the holders, replaced as a whole, because other threads read it
        self._known = set[str]()
        self._waiting: list[int] | None = None
        self._closing = threading.Event()
        threading.Thread(target=self._run, name="tandem-spares", daemon=True).start()

    def is_gone(self, address: str) -> bool:
        place, _, rest = address.partition(".")
        token = self._tokens.get(int(place)) if place.isdecimal() else None
        return token is not None and not rest.endswith(f".{token}")

    def end(self, store: TCPStore | None) -> None:
        self._closing.set()
        if store is None:
            return
        with contextlib.suppress(RuntimeError, StoreLostError):
            store.set(END_KEY, "1")
            deadline = running_clock.now() + SPARES_LEAVE_SECONDS
            while job_end_in(store) is not None and running_clock.now() < deadline:
                if store.add(SPARES_LEFT_KEY, 0) >= len(self._waiting or ()):
                    return
                time.sleep(SPARE_BEAT_SECONDS)

    def _run(self) -> None:
        store: TCPStore | None = None
        while not self._closing.wait(self._pause):
            try:
                store = store or self._connect()
                self._assign(store)
            except Exception:  # without this thread, no node would get a place
                log.debug("assigning places failed; retrying", exc_info=True)
                store = None
                self._known.clear()
                self._closing.wait(STORE_RETRY_SECONDS)

    def _assign(self, store: TCPStore) -> None:
        """Read the nodes' reports, decide, and publish the result."""
        table = self._table
        keys = {name(node): node for node in table.others for name in (_report_key, _failures)}
        found = read_all(store, list(keys), self._known)
        now = running_clock.now()
        for node in table.others:
            with contextlib.suppress(ValueError, KeyError):  # no report, or none that can be read
                table.hear(node, report_from(found[_report_key(node)]), now)
            with contextlib.suppress(ValueError, KeyError):
                table.charge(node, int(found[_failures(node)]))
        is_training = not self.is_joining and self._view.quiet_seconds < self._long_silence
        changes = table.decide(now, self.is_joining, is_training)
        if changes:
            self._tokens = {place: holder.token for place, holder in table.holders.items()}
            store.set(PLACES_KEY, to_text(table.holders))
        self._show(changes, table.waiting(now))

    def _show(self, changes: list[Reassignment], waiting: list[int]) -> None:
        for change in (each for each in changes if each.why):
            text = "node %d %s; node %d takes its place"
            if change.is_left_out:
                text = "node %d %s and is left out while another node can take its place; node %d does"
            log.warning(text, change.before, change.why, change.node)
            kind = "node_left_out" if change.is_left_out else "node_replaced"
            self._view.event(
                kind, node=change.before, by=change.node, place=f"node {change.place}", reason=change.why
            )
        if waiting != self._waiting:
            self._waiting = waiting
            self._view.show_spares(waiting)


def places_of(node: NodeContext, on_place: Callable[[int], None]) -> Places:
    """Return the object that assigns places (node 0), or waits for one (other nodes).

    Without spares, it does neither. `on_place` is called with each place that this node gets.
    """
    if node.placement.elastic is not None and node.placement.node_rank != 0:
        return ElasticPlace(node)
    if node.placement.spares == 0:
        return Places()
    return AllPlaces(node) if node.placement.node_rank == 0 else OwnPlace(node, on_place)


def _pause(placement: Placement) -> float:
    """Return the seconds between two reports of a node: longer among many nodes."""
    return max(SPARE_BEAT_SECONDS, 2 * poll_intervals(placement.nodes + placement.spares).poll_seconds)


def _report_key(node: int) -> str:
    return f"tandem/spares/report/{node}"


def _failures(node: int) -> str:
    return f"tandem/spares/failures/{node}"
