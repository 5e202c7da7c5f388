"""Run the agent of a user script: attribute failures, decide what is restarted, and report one cause.

Its ranks use a new store in each generation, as torchrun's do: `env://` adds no prefix, so ranks would read
the addresses of dead ranks in an older store. See docs/architecture.md#user-scripts.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup

from tandem import running
from tandem.distributed.position import Position
from tandem.errors import FAILED, FINISHED, KILLED, PEER_LOST, STOPPED, is_own, was_killed
from tandem.launch.endings import Cause, choose, failures, is_of_tandem, last_words
from tandem.launch.generations import NodeAgent
from tandem.launch.rendezvous import VERDICT_KEY, VerdictError, leave_verdict, verdict_in
from tandem.launch.rendezvous_state import others_live
from tandem.launch.restarts import is_retried, job_code
from tandem.launch.round import agreed
from tandem.launch.stops import TRAINED, Stopping
from tandem.script.environment import error_file
from tandem.timeouts import (
    LEAVE_SECONDS,
    MONITOR_SECONDS,
    OTHERS_SECONDS,
    WAITING_WORD_SECONDS,
)

log = logging.getLogger("tandem.agent")

CAUSE_KEY = "tandem/cause"


class ScriptAgent(NodeAgent):
    """Restart what was killed, hangs or has lost its peers, and with --restart-on-error every failure."""

    _meeting: TCPStore | None = None
    _cause: Cause | None = None

    def run_generations(self) -> tuple[int, str]:
        try:
            code, reason = super().run_generations()
            if code == FINISHED and self._node.placement.nodes > 1:
                self._await_other_nodes()
        except VerdictError as verdict:
            # Another node's ranks succeeded before they knew of the failure here. 0 would tell the platform
            # that the job is done.
            if verdict.code == FINISHED and self._cause is not None:
                return FAILED, f"the ranks on other nodes finished without it: {self._cause.told()}"
            raise VerdictError(verdict.code, self._told_by_others() or str(verdict)) from None
        if is_own(code) and self._cause is not None:
            with contextlib.suppress(RuntimeError):
                self._root.set(CAUSE_KEY, self._cause.to_json())
            reason = self._told(self._cause)
        return code, reason

    def _what_there_is(self) -> str:
        return TRAINED  # a script handles a stop wherever it is, and knows itself what has to be saved

    def _may_save(self) -> bool:
        return False  # the agent has no state of a script in memory, so one more start would save nothing

    def _await_other_nodes(self) -> None:
        """Wait on node 0 until the ranks of all nodes have succeeded; the ranks here have.

        Other nodes return at once. The wait lasts up to --master-timeout. Raises VerdictError if other nodes
        end in another way.
        """
        position, config, heard = self._positions[0], self._node.config, running.now()
        key = f"{position.store[2] if position.store else ''}/well"
        with contextlib.suppress(RuntimeError):
            self._root.add(key, 1)
        if self._node.placement.node_rank != 0:
            return
        # A node that is restarted meanwhile reads it and exits with 0.
        leave_verdict(self._root, FINISHED, "")
        deadline, next_word = heard + config.master_timeout, heard + WAITING_WORD_SECONDS
        while (well := self._root.add(key, 0)) < position.nodes:
            # A failure replaces the success in the store, whichever node was first.
            if (verdict := verdict_in(self._root)) is not None and verdict.code != FINISHED:
                raise verdict
            now = running.now()
            if others_live(self._handler, self._node.placement):
                heard, self._node.view.last_progress = now, time.time()
            # A stop during this wait must not outlast the time that ranks have to stop.
            if self._stop and self._stopping is None:
                self._stopping = Stopping(self._node, self._there)
                deadline = min(deadline, now + config.shutdown_timeout)
            if now > min(deadline, heard + LEAVE_SECONDS) or self._stop.interrupts > 1:
                # No node may read a success any more.
                self._root.delete_key(VERDICT_KEY)
                said = f"the ranks on {well} of {position.nodes} nodes finished, the others did not"
                why = "they may be lost, or need a longer --master-timeout"
                raise VerdictError(STOPPED if self._stop else PEER_LOST, f"{said}; {why}")
            if now > next_word:
                next_word = deadline
                log.info("the ranks on this node finished; waiting for the other nodes")
            time.sleep(MONITOR_SECONDS)

    def _explained(self, codes: Mapping[int, int | None]) -> int:
        first = failures(codes)
        # No rank failed here: the code is 0 or 143.
        if not first:
            return self._asked_to_stop(job_code([code for code in codes.values() if code is not None]))
        later = self._await_blame()
        local_rank, code = choose(first, later)
        if self._stop and code == PEER_LOST and STOPPED in self._workers.codes().values():
            return STOPPED  # it lost the rank that handled the signal first
        self._cause = cause = self._cause_of(local_rank, code)
        if self._node.placement.nodes > 1 and not self._stop:
            with contextlib.suppress(RuntimeError):
                self._root.set(self._ended_key(self._positions[local_rank]), cause.to_json())
                # A rank that was killed here is the cause. A failed one may only be the consequence of a kill
                # elsewhere.
                self._cause = cause = cause if was_killed(code) else self._explained_elsewhere(cause)
                code = cause.code
        if code == PEER_LOST and FINISHED in self._workers.codes().values():
            self._cause = replace(cause, code=FAILED)  # no rank was lost: some ranks returned too early
            return FAILED
        return code

    def _asked_to_stop(self, code: int) -> int:
        """Return 143 for a requested stop, and 137 if the ranks stopped without a request to this agent.

        Some frameworks, such as Lightning, exit with 0 when they are asked to stop. 0 would tell the platform
        that the job is done.
        """
        if code == FINISHED and self._stopping is not None:
            return STOPPED
        # The signal may reach the ranks before their agent.
        deadline = running.now() + OTHERS_SECONDS
        while code == STOPPED and not self._stop:
            if running.now() > deadline:
                return KILLED
            time.sleep(MONITOR_SECONDS)
        return code

    def _explained_elsewhere(self, ours: Cause) -> Cause:
        """Return the cause that other nodes have published, if it explains ours.

        A killed rank explains most, then a failed one.
        """
        position, found = self._positions[0], ours
        others = [replace(position, node_rank=node) for node in range(position.nodes)]
        keys = [self._ended_key(each) for each in others if each.node_rank != position.node_rank]
        deadline = running.now() + OTHERS_SECONDS
        while running.now() < deadline:
            for key in [key for key in keys if self._root.check([key])]:
                try:
                    theirs = Cause.from_json(self._root.get(key))
                except ValueError:
                    continue
                if was_killed(theirs.code):
                    return theirs
                if theirs.code != PEER_LOST and found.code == PEER_LOST:
                    found = theirs
            time.sleep(MONITOR_SECONDS)
        return found

    def _ended_key(self, position: Position) -> str:
        return f"{position.store[2] if position.store else ''}/ended/{position.node_rank}"

    def _cause_of(self, local_rank: int, code: int) -> Cause:
        position = self._positions[local_rank]
        log = self._node.run.rank_log(position.rank)
        words = last_words(error_file(position), log)
        # A rank that could not save before it stopped exits with 137, but has not been killed.
        if was_killed(code) and not (words and is_of_tandem(words[-1])):
            words = ()
        return Cause(position.rank, position.node_rank, position.node_name, code, words)

    def _told(self, cause: Cause) -> str:
        """Return the cause with its traceback, unless rank 0 has shown that on node 0's terminal already."""
        return cause.in_one_line() if cause.rank == 0 else cause.told()

    def _told_by_others(self) -> str:
        with contextlib.suppress(RuntimeError, ValueError):
            if self._root.check([CAUSE_KEY]):
                cause = Cause.from_json(self._root.get(CAUSE_KEY))
                return self._told(cause) if self._node.placement.node_rank == 0 else str(cause)
        return ""

    def _is_done(self) -> bool:
        """Accept a job result of 0, which only the script can check.

        If a rank here has failed, `run_generations` rejects it.
        """
        return True

    def _is_retried(self, code: int) -> bool:
        return is_retried(code) or (self._node.config.restart_on_error and is_own(code))

    def _is_to_blame(self, code: int) -> bool:
        """Charge every restart to every node, as torchrun does.

        A failure that recurs cannot be told from bad luck.
        """
        return True

    def _known_cause(self) -> str:
        cause = self._cause
        is_known = cause is not None and cause.code != PEER_LOST and not was_killed(cause.code)
        return str(cause) if is_known else super()._known_cause()

    def _said(self, codes: Mapping[int, int]) -> str:
        if self._cause is None:
            return super()._said(codes)
        return str(self._cause) if self._cause.code == PEER_LOST else self._cause.in_one_line()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        group = cast(Any, worker_group)
        self._cause = None
        # The first node of the round hosts the generation's store. The store of the last generation is
        # dropped with its reference.
        if group.group_rank == 0:
            self._meeting, address = self._node.place.host_for_ranks()
            group.store.set("tandem/master", address)
        return super()._start_workers(worker_group)

    def _position(self, worker: Any, group: Any, prefix: str) -> Position:
        host, _, port = agreed(group.store, "tandem/master", r"[\w.:\[\]-]{1,255}:\d{1,5}").rpartition(":")
        found = super()._position(worker, group, prefix)
        master = self._node.place.of_ranks(host, int(port))
        return replace(found, master=master, local_world_size=self._node.nproc)
