"""One generation of the ranks after another: torch's elastic agent with our own decisions.

A generation is what torchrun calls a restart: all ranks of all nodes, started together by one rendezvous.
torch's engine gives the rendezvous (who is in, in which order) and the worker group. Stock agents restart
after every failure; this one decides by the exit codes of its ranks (see `restarts.is_retried`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Mapping
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

from tandem import running
from tandem.checkpoint.listing import is_finished
from tandem.distributed.group import Position, first_line
from tandem.errors import FINISHED, INTERRUPTED_TWICE, KILLED, PEER_LOST, STOPPED, StuckError
from tandem.launch.elastic import Departures
from tandem.launch.endings import failures
from tandem.launch.membership import Membership
from tandem.launch.part import Node
from tandem.launch.recovery import Recovery
from tandem.launch.rendezvous import (
    LEFT_KEY,
    StopRequestedError,
    StoreLostError,
    heed_verdict,
    is_confirmed,
    leave_verdict,
    stay_until_all_left,
    verdict_in,
)
from tandem.launch.rendezvous_state import check_all_stay, handler_of, others_live, paces, who_is_here
from tandem.launch.repeats import Repeats
from tandem.launch.restarts import RestartBudget, is_retried, job_code
from tandem.launch.round import RoundStore, agree_on_generation, check_all_are_in
from tandem.launch.stacks import gather_stacks
from tandem.launch.stops import Stopping, is_time_to_save, what_there_is
from tandem.launch.watchdog import Watchdog
from tandem.signals import handed_on
from tandem.telemetry.hangs import Alarm
from tandem.timeouts import (
    BLAME_SECONDS,
    ENDING_SECONDS,
    MEMBERSHIP_SECONDS,
    MONITOR_SECONDS,
    STANDBY_SECONDS,
    UNMET_SECONDS,
    WAITING_WORD_SECONDS,
)
from tandem.torch_private import stop_keep_alive

log = logging.getLogger("tandem.agent")


class NodeAgent(SimpleElasticAgent):
    """One connection to the agents' store, and the generations that this node takes part in through it."""

    def __init__(self, node: Node, store: TCPStore, watchdog: Watchdog, budget: RestartBudget) -> None:
        self._node, self._root, self._watchdog, self._budget = node, store, watchdog, budget
        self._workers, self._stop = node.workers, node.stop
        self._joining, self._restart, self._positions = False, 0, dict[int, Position]()
        self._hang: Alarm | None = None
        self._has_saved, self._waiting_since, self._next_word = False, running.now(), 0.0
        self._recovery, self._departures = Recovery(node, store), Departures(node.placement, store)
        self._repeats = Repeats(node, store)
        self._handler = handler = handler_of(node.placement, store, node.config, self._before_poll)
        spec = WorkerSpec(
            role="default",
            local_world_size=node.nproc,
            rdzv_handler=handler,
            fn=node.workers.start,
            max_restarts=node.config.max_restarts,
            monitor_interval=MONITOR_SECONDS,
        )
        super().__init__(spec)

    def run_generations(self) -> tuple[int, str]:
        """Start generations until one ends in a way that is not retried: (exit code, why)."""
        while True:
            self._await_end_of_last()
            self._joining, self._waiting_since, self._next_word = True, running.now(), 1.0
            if self._budget.generations:
                self._node.view.rejoining()
            try:
                self._initialize_workers(self._worker_group)
            except StopRequestedError:
                if not self._has_saved:
                    raise
                return STOPPED, f"stopped by {self._stop.name} after all ranks had saved for a departing node"
            self._joining, self._hang, self._has_saved = False, None, False
            self._ended_elsewhere_since: float | None = None
            membership = Membership(self._is_over)
            try:
                code = self._watch(membership)
            except StopRequestedError:  # before a step: nobody has to hear of it
                self._positions = {}
                raise
            finally:
                membership.close()
            self._watchdog.end_generation(self._root)
            if code == STOPPED and not self._stop and self._departures.others_go_on(self._positions[0]):
                log.info(
                    "a node was asked to stop and leaves; the others continue from the step where all stopped"
                )
                self._workers.kill()
                self._has_saved = True
                continue
            self._recovery.failed(self._positions, self._workers.codes(), self._workers.aborted())
            if code is None:
                self._workers.kill()
                if self._ended_elsewhere_since is None:
                    self._recovery.interrupted(self._restart + 2)
                continue
            if not self._is_retried(code):
                self._workers.wait(ENDING_SECONDS)  # rank 0 may be saving, and has to say what is wrong
            codes = self._workers.kill() or {0: code}
            said = self._said(codes)
            if self._stop and self._is_retried(code) and code != INTERRUPTED_TWICE:
                if not self._may_save():
                    return KILLED, f"stopped by {self._stop.name} without a checkpoint ({said})"
                said = f"{said}; one more start, to save before stopping"
            elif self._stop or not self._is_retried(code):
                return code, said
            if (again := self._same_hang_again()) is not None:
                return PEER_LOST, again.text
            if self._is_to_blame(code):
                self._budget.incidents += 1
            if self._budget.is_spent:
                return KILLED if self._stop else PEER_LOST, f"{self._budget} is spent: {said}"
            log.warning("%s; restarting all ranks (generation %d)", said, self._restart + 2)
            self._repeats.ended(code, self._positions, codes)

    _is_retried = staticmethod(is_retried)

    def _same_hang_again(self) -> Alarm | None:
        """The hang that has ended this generation, if one has ended so before: it would come each time."""
        return self._hang if self._hang is not None and self._hang.again else None

    def _may_save(self) -> bool:
        waits_since = self._waiting_since if self._joining else None
        return is_time_to_save(self._node, self._watchdog.has_ever_trained, waits_since)

    def _said(self, codes: Mapping[int, int]) -> str:
        """How a generation ended on this node, in words."""
        shown = {PEER_LOST: f"{PEER_LOST} (lost other ranks)"}
        ends = (shown.get(each, str(each)) for each in sorted(set(codes.values())))
        said = f"ranks exited with {', '.join(ends)}"
        return f"{said}: {words}" if (words := self._node.view.last_words) else said

    def _explained(self, codes: Mapping[int, int | None]) -> int:
        """The node's code, once a rank has failed or all have ended: {local rank: code, if any}."""
        code = job_code([code for code in codes.values() if code is not None])
        if code == PEER_LOST and (self._positions[0].nodes == 1 or self._node.view.last_words):
            return job_code(list(self._await_blame().values()))
        return code

    def _await_blame(self) -> dict[int, int]:
        """The failures on this node, once one of them is more than a lost peer, or BLAME_SECONDS are over.

        A rank's connections close before its process ends, so the ranks that lost it may end first.
        """
        deadline = running.now() + BLAME_SECONDS
        while True:
            codes = self._workers.codes()
            failed = failures(codes)
            explained = any(code != PEER_LOST for code in failed.values())
            if explained or None not in codes.values() or running.now() > deadline:
                return failed
            self._workers.pause(MONITOR_SECONDS)

    def _is_to_blame(self, code: int) -> bool:
        """Whether a failure is an incident of this node: one that only lost its peers spends no budget.

        Unless it never trained: what keeps a generation from beginning comes back every time. A rank may be
        seen to have lost its peers before the killed one is seen; of a single node all peers are here.
        """
        if self._hang is not None:
            return self._hang.node == self._node.placement.node_rank
        if self._positions[0].nodes == 1:
            return True
        has_lost_others = code == PEER_LOST or self._recovery.has_lost_others()
        return not has_lost_others or not self._watchdog.has_trained

    def _watch(self, membership: Membership) -> int | None:
        """Watch one generation: its exit code on this node, or None when nodes wait to be let in."""
        self._stopping: Stopping | None = None
        next_fork = running.now() + MEMBERSHIP_SECONDS
        while True:
            self._workers.pause(MONITOR_SECONDS)
            self._node.claim.check()
            now = running.now()
            codes = self._workers.codes()
            ended = [code for code in codes.values() if code is not None]
            if any(code not in (0, 143) for code in ended) or len(ended) == len(codes):
                return self._explained(codes)
            if (alarm := self._watchdog.alarm) is not None:
                return self._end_hang(alarm)
            if self._stop and self._stopping is None:
                self._stopping = Stopping(self._node, self._there)
                self._workers.signal(handed_on(self._stop.signal_number or 15))
                self._departures.leaves(self._positions[0])
            if self._stop.interrupts > 1:
                return INTERRUPTED_TWICE
            if self._stopping and (code := self._stopping.code(self._watchdog.has_trained)) is not None:
                return code
            if self._watchdog.has_trained:
                self._recovery.trains()
                if now > next_fork:
                    next_fork = now + STANDBY_SECONDS
                    self._workers.stand_by(self._node.nproc)
            if membership.is_awaited() and not ended and self._stopping is None:
                return None

    def _end_hang(self, alarm: Alarm) -> int:
        """Say who hangs, and let the ranks write their stacks before they are killed."""
        log.error("%s", alarm.text)
        self._node.view.hung(alarm)
        self._hang = alarm
        ranks = {local_rank: position.rank for local_rank, position in self._positions.items()}
        if said := gather_stacks(self._workers, ranks, self._node.run.logs):
            log.info("%s", said)
        return PEER_LOST

    def _await_end_of_last(self) -> None:
        """No generation begins while a process of the last one lives, which `Workers.kill` has named.

        It may keep what the next one needs, a GPU's memory or a port. Raises StuckError where it stays.
        """
        deadline = time.monotonic() + self._node.config.master_timeout
        while left := self._workers.left():
            if self._stop:
                raise StopRequestedError
            if time.monotonic() > deadline:
                raise StuckError(f"{', '.join(map(str, left))} cannot be killed; reboot this machine")
            self._node.claim.check()
            time.sleep(MEMBERSHIP_SECONDS)

    def _is_over(self) -> bool:
        """Whether these ranks are to end: nodes wait to be let in, or the job has ended elsewhere."""
        return self._nodes_waiting() or self._has_ended_elsewhere()

    def _has_ended_elsewhere(self) -> bool:
        """Whether another node ended the job before a rank here has taken a step.

        Ranks that have met lose their peers; those that wait for them, as in init_process_group, would wait
        until its timeout. They get UNMET_SECONDS to end by themselves.
        """
        verdict = None if self._watchdog.has_trained else verdict_in(self._root)
        if verdict is None or verdict.code == FINISHED:
            self._ended_elsewhere_since = None
            return False
        self._ended_elsewhere_since = self._ended_elsewhere_since or running.now()
        return running.now() > self._ended_elsewhere_since + UNMET_SECONDS

    def _nodes_waiting(self) -> bool:
        try:
            return bool(self._handler.num_nodes_waiting() > 0)
        except StopRequestedError:
            return False
        except RendezvousError as error:
            raise StoreLostError from error

    def _before_poll(self) -> None:
        """Called before each look at the rendezvous: signals, the job's verdict, and a word while waiting."""
        if not self._joining or threading.current_thread() is not threading.main_thread():
            return  # the engine's keep-alive looks, too
        if self._stop and not self._may_save():
            raise StopRequestedError
        self._node.claim.check()
        heed_verdict(self._root, self._is_done)
        waited = running.now() - self._waiting_since
        if waited > self._next_word:
            self._next_word = waited + WAITING_WORD_SECONDS
            here = who_is_here(self._handler, self._node.placement)
            log.info("waiting: %s (%.0f of %.0f s)", here, waited, self._node.config.master_timeout)

    def _is_done(self) -> bool:
        """Whether a verdict of 0 can be: the last step is saved, which only node 0 surely sees."""
        if self._node.placement.node_rank != 0:
            return is_confirmed(self._root)
        return is_finished(self._node.run.checkpoints)

    def _has_no_time(self) -> bool:
        """Stopped before any of its ranks began, or by a person who will not wait."""
        return bool(self._stop) and (not self._positions or self._stop.interrupts > 1)

    def abandon(self) -> None:
        """This connection is given up: nothing of it goes on saying that the node lives, into the void."""
        stop_keep_alive(self._handler)

    def leave(self, code: int, reason: str) -> bool:
        """Tell the others how the job ended; node 0 stays until they have heard it. Whether they go on."""
        self._joining = False  # what ends it is known: no look at the rendezvous finds another end
        with contextlib.suppress(RuntimeError, RendezvousError, OSError):
            if code == STOPPED and self._positions and self._departures.can_leave(self._positions[0]):
                self._departures.go(self._handler)
                return True
            if not self._is_retried(code) or self._budget.is_spent or self._same_hang_again() is not None:
                leave_verdict(self._root, code, reason)
        stop_keep_alive(self._handler)
        with contextlib.suppress(RuntimeError, RendezvousError, OSError):
            left, placement = self._root.add(LEFT_KEY, 1), self._node.placement
            stays = running.now() + self._node.config.master_timeout * (code == FINISHED)
            while placement.node_rank == 0 and left < placement.nodes:
                left = stay_until_all_left(self._root, placement.nodes, left, should_stop=self._has_no_time)
                if self._stop or running.now() > stays or not others_live(self._handler, placement):
                    break
                self._node.view.last_progress = time.time()
        return False

    # What torch's engine asks of an agent.

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        try:
            super()._rendezvous(worker_group)
        except (ValueError, TypeError, KeyError) as error:  # anyone who reaches the store can write there
            raise StoreLostError(
                f"the rendezvous data in the store is damaged ({first_line(error)})"
            ) from error
        group = cast(Any, worker_group)  # torch annotates what it fills in later as None
        group.store = self._heeding(group.store, group.group_world_size)

    def _assign_worker_ranks(self, store: Any, group_rank: int, nodes: int, spec: WorkerSpec) -> Any:
        return super()._assign_worker_ranks(self._heeding(store, nodes), group_rank, nodes, spec)

    def _heeding(self, store: Any, nodes: int) -> RoundStore:
        def look() -> None:
            self._before_poll()
            check_all_stay(self._handler, nodes)

        return RoundStore(store, look, paces(nodes).poll_seconds / 10)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Give every local rank its position and fork it."""
        group, placement = cast(Any, worker_group), self._node.placement
        check_all_are_in(placement, group.group_world_size)
        mine = (self._budget.generations, self._what_there_is()) if group.group_rank == 0 else None
        prefix, self._restart, self._there = agree_on_generation(group.store, mine)
        self._budget.generations += 1
        self._positions = positions = {
            worker.local_rank: self._position(worker, group, prefix) for worker in group.workers
        }
        self._node.view.generation_started(self._budget.generations, positions[0])
        pids = self._workers.start(positions)
        everyone = range(max(placement.nodes, (placement.elastic or (0, 0))[1]))
        by_rank = {positions[local_rank].rank: pid for local_rank, pid in pids.items()}
        self._node.view.ranks_started(by_rank)
        self._watchdog.begin_generation(prefix, by_rank, everyone)
        for local_rank, pid in pids.items():
            log.info("%s is process %d", positions[local_rank], pid)
        return dict(pids)

    def _what_there_is(self) -> str:
        return what_there_is(self._node)

    def _position(self, worker: Any, group: Any, prefix: str) -> Position:
        return self._node.position(worker, group, prefix, self._restart)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._workers.kill()

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = self._workers.codes().values()
        return RunResult(state=WorkerState.HEALTHY if None in codes else WorkerState.STOPPED)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        self._workers.kill()
