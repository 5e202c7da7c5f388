"""Run the generations of a node's ranks: torch's elastic agent with tandem's own decisions.

A generation is what torchrun calls a restart: all ranks of all nodes, started together after one rendezvous.
torch's agent provides the rendezvous (which nodes, in which order) and the worker group. It would restart
after every failure; this one decides by the exit codes of its ranks (`errors.is_retried`). See
docs/architecture.md#who-decides-restarts.
"""

import contextlib
import logging
import threading
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import RendezvousError

from tandem import running_clock
from tandem.distributed.position import Grant, Position, RankStart
from tandem.errors import FAILED, FINISHED, INTERRUPTED_TWICE, KILLED, PEER_LOST, STOPPED, is_own, was_killed
from tandem.launch import generation_sync as sync
from tandem.launch.code_watch import CodeWatch
from tandem.launch.node_context import NodeContext, RestartBudget
from tandem.launch.recovery import Recovery, RepeatedFailures
from tandem.launch.rendezvous import (
    JobEndedError,
    StopRequestedError,
    StoreLostError,
    check_job_result,
    is_confirmed,
    job_end_in,
    publish_job_result,
)
from tandem.launch.rendezvous_state import check_all_stay, describe_joined_nodes, handler_of, poll_intervals
from tandem.launch.shutdown import (
    Stopping,
    await_departures,
    await_end_of_ranks,
    await_other_nodes,
    cause_in,
    is_time_to_save,
    leave_cause,
)
from tandem.launch.spares import Places
from tandem.launch.watchdog import Watchdog, gather_stacks
from tandem.signals import forwarded_as
from tandem.telemetry.hangs import Alarm
from tandem.text import first_line
from tandem.timeouts import (
    ENDING_SECONDS,
    MEMBERSHIP_SECONDS,
    MONITOR_SECONDS,
    STANDBY_SECONDS,
    UNMET_SECONDS,
    WAITING_WORD_SECONDS,
)
from tandem.torch_private import stop_keep_alive
from tandem.work.base import Cause, GenerationEnd

log = logging.getLogger("tandem.agent")


class NodeAgent(SimpleElasticAgent):
    """One connection to the agents' store, and the generations that this node takes part in through it."""

    def __init__(
        self,
        node: NodeContext,
        store: TCPStore,
        watchdog: Watchdog,
        budget: RestartBudget,
        places: Places,
        code: CodeWatch,
        recovery: Recovery,
    ) -> None:
        self._node = node
        self._places = places
        self._code = code
        self._root = store
        self._watchdog = watchdog
        self._budget = budget
        self._work = node.work
        self._workers = node.workers
        self._stop = node.stop
        self._joining = False
        self._positions = dict[int, Position]()
        self._prefix = ""  # of this generation's keys in the store
        self._grant = Grant()
        self._hang: Alarm | None = None
        self._cause: Cause | None = None  # why the last generation ended, if the workload knows
        self._meeting: TCPStore | None = None  # the store of the ranks, if they have their own
        self._has_saved = False
        self._waiting_since = running_clock.now()
        self._next_word = 0.0
        self._recovery = recovery
        self._departures = sync.Departures(node.placement, store)
        self._repeats = RepeatedFailures(node, store)
        name = places.address(node.placement)
        self._handler = handler = handler_of(
            node.placement, store, node.config, self._before_poll, name, places.is_gone
        )
        spec = WorkerSpec(
            role="default",
            local_world_size=node.nproc,
            rdzv_handler=handler,
            entrypoint=node.workers.start,
            max_restarts=node.config.max_restarts,
            monitor_interval=MONITOR_SECONDS,
        )
        super().__init__(spec)

    def run_generations(self) -> tuple[int, str]:
        """Run generations until one ends in a way that is not retried; return (exit code, reason)."""
        try:
            code, reason = self._run_generations()
            # A task's checkpoints prove that all nodes are done; a script's nodes have to agree. See
            # docs/architecture.md#user-scripts.
            if code == FINISHED and not self._work.saves and self._node.placement.nodes > 1:
                await_other_nodes(
                    self._node, self._root, self._handler, self._prefix, self._positions[0].nodes
                )
        except JobEndedError as result:
            # Another node's ranks succeeded before they knew of the failure here. 0 would tell the platform
            # that the job is done.
            if result.code == FINISHED and self._cause is not None:
                return FAILED, f"the ranks on other nodes finished without it: {self._cause.with_traceback()}"
            reason_elsewhere = cause_in(self._root, self._node.placement.node_rank)
            raise JobEndedError(result.code, reason_elsewhere or str(result)) from None
        if is_own(code) and self._cause is not None:
            reason = leave_cause(self._root, self._cause)
        return code, reason

    def _run_generations(self) -> tuple[int, str]:
        while True:
            await_end_of_ranks(self._node)
            self._joining = True
            self._waiting_since = running_clock.now()
            self._next_word = 1.0
            only_saves = bool(self._stop)
            if self._budget.generations:
                self._node.view.rejoining()
            self._places.joins()
            try:
                self._initialize_workers(self._worker_group)
            except StopRequestedError:
                # `_before_poll` raises it only while there is nothing to save. After a departure everything
                # was saved.
                if not self._has_saved:
                    raise
                return STOPPED, f"stopped by {self._stop.name} after all ranks had saved for a departing node"
            self._joining = False
            self._places.has_joined()
            self._hang = None
            self._has_saved = False
            self._ended_elsewhere_since: float | None = None
            membership = sync.Membership(self._is_over)
            try:
                code = self._watch(membership)
            except StopRequestedError:  # no step was taken, so `leave` need not wait for others
                self._positions = {}
                raise
            finally:
                membership.close()
            self._watchdog.end_generation(self._root)
            # Another node of an elastic job leaves. All ranks have saved and stopped with 143; this node
            # continues with the next one, and its own stop (if a signal arrives now) finds everything saved.
            if code == STOPPED and not self._stop and self._departures.others_continue():
                log.info(
                    "a node was asked to stop and leaves; the others continue from the step where all stopped"
                )
                self._workers.kill()
                self._has_saved = True
                continue
            # Read before `kill`, whose SIGKILLs would look like the cause.
            ended = self._workers.codes(), self._workers.aborted()
            self._recovery.failed(self._positions, self._prefix, *ended, why=self._known_cause())
            if code is None and self._recovery.is_wrong:
                code = PEER_LOST  # the ranks here end later than those of other nodes, which already wait
            if code is None:
                self._workers.kill()
                # None: nodes wait to join, or the job ended elsewhere. The latter needs no line here,
                # because the next rendezvous reads and reports the job's result.
                if self._ended_elsewhere_since is None:
                    self._recovery.interrupted(self._grant.restart + 2)
                continue
            if not self._work.is_retried(code):
                # Rank 0 may be saving, and its error is the reason to report.
                self._workers.wait(ENDING_SECONDS)
            codes = self._workers.kill() or {0: code}
            if (end := self._end_of_job(code, codes, only_saves)) is not None:
                return end

    def _end_of_job(self, code: int, codes: Mapping[int, int], only_saves: bool) -> tuple[int, str] | None:
        """Return how the job ends for this node after a failed generation, or None for another generation.

        Charges the failure to the restart budget. `only_saves`: the generation was started only to save.
        """
        how = self._describe_end(codes)
        # A stop is requested but the ranks were killed or lost their peers, so nothing is saved yet.
        # Start all ranks once more, to save a snapshot in node 0's memory that is newer than the disk.
        if self._stop and self._work.is_retried(code) and code != INTERRUPTED_TWICE:
            # A rank that was started only to save, and said why it could not, would fail again.
            if not self._may_save() or (only_saves and self._node.view.last_words):
                return KILLED, f"stopped by {self._stop.name} without a checkpoint ({how})"
            how = f"{how}; one more start, to save before stopping"
        elif self._stop or not self._work.is_retried(code):
            return code, how
        # A third attempt would hang in the same place.
        if self._hang is not None and self._hang.again:
            return PEER_LOST, self._hang.text
        if self._recovery.is_wrong and not self._places.give_up(self._root):
            return FAILED, f"{how}; no spare has taken its place: start the job again without that machine"
        # A lack of memory is charged to no node: the micro-batch can be halved only a few times.
        # Charge any other failure to one node only; see `_is_to_blame`.
        if not self._recovery.request and self._is_to_blame(code):
            self._budget.incidents += 1
            if self._hang is not None or (code != PEER_LOST and not self._recovery.has_lost_others()):
                self._places.charge(self._root)
        if self._budget.is_spent:
            return KILLED if self._stop else PEER_LOST, f"{self._budget} is spent: {how}"
        log.warning("%s; restarting all ranks (generation %d)", how, self._grant.restart + 2)
        if not self._recovery.request:
            self._repeats.ended(code, self._positions, self._prefix, self._grant, codes)
        return None

    def _may_save(self) -> bool:
        waits_since = self._waiting_since if self._joining else None
        return self._work.saves and is_time_to_save(self._node, self._watchdog.has_ever_trained, waits_since)

    def _known_cause(self) -> str:
        """Return why the generation ended, if exit codes do not show it; else ""."""
        cause = self._cause
        if cause is not None and cause.code != PEER_LOST and not was_killed(cause.code):
            return str(cause)
        return "" if self._hang is None else f"rank {self._hang.rank} on node {self._hang.node} hung"

    def _describe_end(self, codes: Mapping[int, int]) -> str:
        """Describe on one line how a generation ended on this node."""
        if self._cause is not None:
            return str(self._cause) if self._cause.code == PEER_LOST else self._cause.in_one_line()
        # The codes are those of ranks that this agent has killed, or of any that lost a peer.
        if known := self._known_cause() or self._recovery.request:
            return known
        shown = {PEER_LOST: f"{PEER_LOST} (lost other ranks)"}
        ends = (shown.get(each, str(each)) for each in sorted(set(codes.values())))
        text = f"ranks exited with {', '.join(ends)}"
        return f"{text}: {words}" if (words := self._node.view.last_words) else text

    def _explained(self, codes: Mapping[int, int | None]) -> int:
        """Return the node's exit code after a rank failed or all ended."""
        end = GenerationEnd(
            codes=codes,
            now=self._workers.codes,
            blamed=partial(self._recovery.await_blame, self._prefix),
            positions=self._positions,
            prefix=self._prefix,
            grant=self._grant,
            nodes=self._node.placement.nodes,
            stop=self._stop,
            is_forwarded=self._stopping is not None,
            last_words=self._node.view.last_words,
            store=self._root,
        )
        code, self._cause = self._work.explain(end)
        return code

    def _is_to_blame(self, code: int) -> bool:
        """Return whether a failure counts against this node's restart budget.

        A node whose ranks only lost their peers is not charged, unless the generation never trained: what
        keeps a generation from starting would recur every time. On a single node all peers are local, so the
        failure is always its own, even if the lost peers are noticed before the killed rank.
        """
        if self._work.charges_all:  # as torchrun does: a failure that recurs cannot be told from bad luck
            return True
        # The watchdog has identified the node; exit codes say nothing about a hang.
        if self._hang is not None:
            return self._hang.node == self._node.placement.node_rank
        if self._positions[0].nodes == 1:
            return True
        has_lost_others = code == PEER_LOST or self._recovery.has_lost_others()
        return not has_lost_others or not self._watchdog.has_trained

    def _watch(self, membership: sync.Membership) -> int | None:
        """Watch one generation; return its exit code on this node, or None if other nodes end it."""
        self._stopping: Stopping | None = None
        next_fork = running_clock.now() + MEMBERSHIP_SECONDS
        while True:
            self._workers.pause(MONITOR_SECONDS)
            self._node.lease.check()
            now = running_clock.now()
            codes = self._workers.codes()
            ended = [code for code in codes.values() if code is not None]
            # The first failed rank is enough: its peers fail soon, or block in a collective until a timeout.
            if any(code not in (0, 143) for code in ended) or len(ended) == len(codes):
                return self._explained(codes)
            if (alarm := self._watchdog.alarm) is not None:
                return self._end_hang(alarm)
            # Forward the signal once; a second Ctrl-C is handled below.
            if self._stop and self._stopping is None:
                self._stopping = Stopping(self._node, self._progress)
                self._workers.signal(forwarded_as(self._stop.signal_number or 15))
                self._departures.leaves()
            if self._stop.interrupts > 1:
                return INTERRUPTED_TWICE
            if self._stopping and (code := self._stopping.code(self._watchdog.has_trained)) is not None:
                return code
            if self._watchdog.has_trained:
                self._recovery.report_first_step(self._positions[0].nodes)
                # Only now: standby processes would compete with a starting generation for the cores.
                if now > next_fork:
                    next_fork = now + STANDBY_SECONDS
                    self._workers.start_standby(self._node.nproc)
            # Not while ranks end: their exit codes decide first, and a stop must not be lost to a restart.
            if membership.is_awaited() and not ended and self._stopping is None:
                return None

    def _end_hang(self, alarm: Alarm) -> int:
        """Report the hang, and have the ranks write their stacks before they are killed."""
        log.error("%s", alarm.text)
        self._node.view.hung(alarm)
        self._hang = alarm
        ranks = {local_rank: position.rank for local_rank, position in self._positions.items()}
        if where := gather_stacks(self._workers, ranks, self._node.run.logs):
            log.info("%s", where)
        return PEER_LOST

    def _is_over(self) -> bool:
        """Return whether these ranks have to end: nodes wait to be let in, or the job has ended elsewhere."""
        self._places.check(self._root)
        return self._nodes_waiting() or self._has_ended_elsewhere()

    def _has_ended_elsewhere(self) -> bool:
        """Return whether another node ended the job before a rank here finished a step.

        Ranks that have connected lose their peers and end. Ranks that still wait for them, for example in
        init_process_group, would wait until its timeout. They get UNMET_SECONDS to end by themselves.
        """
        result = None if self._watchdog.has_trained else job_end_in(self._root)
        # After a step, lost peers end the ranks. A result of 0 is not acted on, because ranks here may be
        # about to finish as well.
        if result is None or result.code == FINISHED:
            self._ended_elsewhere_since = None
            return False
        self._ended_elsewhere_since = self._ended_elsewhere_since or running_clock.now()
        return running_clock.now() > self._ended_elsewhere_since + UNMET_SECONDS

    def _nodes_waiting(self) -> bool:
        try:
            return bool(self._handler.num_nodes_waiting() > 0)
        except StopRequestedError:
            # `_watch` handles the stop.
            return False
        except RendezvousError as error:
            raise StoreLostError from error

    def _before_poll(self) -> None:
        """Check signals and the job result before each poll of the rendezvous, and log what is awaited."""
        if not self._joining or threading.current_thread() is not threading.main_thread():
            return  # torch's keep-alive thread polls as well; only the main thread may raise these errors
        # Without a step in memory, or time to save it, there is no reason to wait for the other nodes.
        if self._stop and not self._may_save():
            raise StopRequestedError
        self._node.lease.check()
        check_job_result(self._root, self._is_done)
        self._places.check(self._root)
        waited = running_clock.now() - self._waiting_since
        if waited > self._next_word:
            self._next_word = waited + WAITING_WORD_SECONDS
            here = describe_joined_nodes(self._handler, self._node.placement)
            log.info("waiting: %s (%.0f of %.0f s)", here, waited, self._node.config.master_timeout)

    def _is_done(self) -> bool:
        """Return whether a job result of 0 is plausible. Only node 0 is sure to see the checkpoints."""
        if self._work.saves and self._node.placement.node_rank != 0:
            return is_confirmed(self._root)
        return self._work.is_done()

    def _has_no_time(self) -> bool:
        """Return whether to exit without waiting for a save: no rank has trained, or Ctrl-C came twice."""
        return bool(self._stop) and (not self._positions or self._stop.interrupts > 1)

    def abandon(self) -> None:
        """Give up this connection, so that its keep-alive thread does not keep talking to a dead store."""
        stop_keep_alive(self._handler)

    def withdraw(self) -> None:
        """Leave the rendezvous: without this, the others would wait until this node's heartbeat expires."""
        self._joining = False  # this node waits for nothing, so `_before_poll` must not raise
        self._departures.go(self._handler)

    def leave(self, code: int, reason: str) -> bool:
        """Publish how the job ended, and on node 0 wait until the others have read it.

        Returns whether the others continue without this node (--elastic).
        """
        self._joining = False  # the outcome is fixed, so `_before_poll` must not raise another one
        with contextlib.suppress(RuntimeError, RendezvousError, OSError):
            # An elastic job continues without this node, so it leaves no result.
            if code == STOPPED and self._positions and self._departures.can_leave():
                self._departures.go(self._handler)
                return True
            # A retried code is this node's own: its platform restarts it, and the others rejoin. It ends the
            # job only if a restart cannot help.
            is_over = not self._work.is_retried(code) or self._budget.is_spent
            if is_over or (self._hang is not None and self._hang.again):
                publish_job_result(self._root, code, reason)
        stop_keep_alive(self._handler)
        with contextlib.suppress(RuntimeError, RendezvousError, OSError):
            # After a success the others may still be finishing their last save, so node 0 waits as long as
            # for their arrival. Otherwise `stay_until_all_left` has its own limit, LEAVE_SECONDS.
            limit = self._node.config.master_timeout if code == FINISHED else 0.0
            await_departures(self._node, self._root, self._handler, limit, self._has_no_time)
        return False

    # The methods that torch's SimpleElasticAgent calls.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except (ValueError, TypeError, KeyError) as error:  # any client of the store can write there
            raise StoreLostError(
                f"the rendezvous data in the store is damaged ({first_line(error)})"
            ) from error
        group = cast(Any, worker_group)  # torch annotates as None what it fills in later
        group.store = self._interruptible(group.store, group.group_world_size)

    def _assign_worker_ranks(self, store: Any, group_rank: int, nodes: int, spec: WorkerSpec) -> Any:
        return super()._assign_worker_ranks(self._interruptible(store, nodes), group_rank, nodes, spec)

    def _interruptible(self, store: Any, nodes: int) -> sync.GenerationStore:
        def look() -> None:
            self._before_poll()
            check_all_stay(self._handler, nodes)

        return sync.GenerationStore(store, look, poll_intervals(nodes).poll_seconds / 10)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Compute the position of every local rank, and start them there."""
        group = cast(Any, worker_group)
        placement = self._node.placement
        self._cause = None
        # The first node of the round hosts the generation's store. The store of the last generation is
        # dropped with its reference.
        if self._work.has_own_store and group.group_rank == 0:
            self._meeting, address = self._node.endpoint.host_for_ranks()
            sync.publish_ranks_store(group.store, address)
        sync.check_all_are_in(placement, group.group_world_size, group.group_rank)
        # The first node of the round reads its own state and decides for all, so that every node handles a
        # stop in the same way.
        progress = self._work.progress(self._node.view.plan is not None, self._node.resume)
        proposal = (self._budget.generations, progress) if group.group_rank == 0 else None
        self._code.begin_generation(group.store if proposal and placement.nodes > 1 else None)
        prefix, restart, self._progress = sync.agree_on_generation(group.store, proposal)
        if proposal is None:
            self._code.compare(group.store)
        self._budget.generations += 1
        # These may raise, so the last generation's values are replaced afterwards.
        connection = self._node.connection(prefix, group.store)
        self._grant = self._node.grant(restart, self._recovery.with_smaller_batch(self._node.resume))
        self._prefix = prefix
        self._positions = positions = self._node.positions(group)
        self._departures.begin_generation(prefix, positions[0].nodes)
        self._node.view.generation_started(self._budget.generations, positions[0])
        starts = {at: RankStart(each, connection, self._grant) for at, each in positions.items()}
        pids = self._workers.start(starts)
        # An elastic job may have nodes with any rank below MAX.
        everyone = range(max(placement.nodes, (placement.elastic or (0, 0))[1]))
        by_rank = {positions[local_rank].rank: pid for local_rank, pid in pids.items()}
        self._node.view.ranks_started(by_rank)
        self._watchdog.begin_generation(prefix, by_rank, everyone)
        for local_rank, pid in pids.items():
            log.info("%s is process %d", positions[local_rank], pid)
        return dict(pids)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._workers.kill()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._workers.codes().values()
        return RunResult(state=WorkerState.HEALTHY if None in codes else WorkerState.STOPPED)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        self._workers.kill()
