"""Report why ranks were restarted and what it cost: a line on node 0's terminal, an event, a row of the page.

A killed rank's peers only notice that it is gone. Its own agent sees the signal and writes it to the agents'
store before it joins the next rendezvous. Node 0 reads it when all ranks train again. A node that wrote
nothing was lost. See docs/architecture.md#who-decides-restarts.
"""

import contextlib
import json
import logging
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem import running_clock
from tandem.checkpoint.decision import ResumeDecision
from tandem.distributed.position import Grant, Position
from tandem.distributed.restart_notes import WrongNode, newest_in, read
from tandem.errors import FINISHED, GPU_FAILED, PEER_LOST, STOPPED, is_own, shell_code, was_killed
from tandem.launch.node_context import NodeContext
from tandem.log import pluralize
from tandem.script.job import error_file
from tandem.text import format_duration
from tandem.timeouts import BLAME_SECONDS, MONITOR_SECONDS, OTHERS_SECONDS
from tandem.work.base import Cause, failures, last_words, signal_name

log = logging.getLogger("tandem.agent")

ABORTED = -signal.SIGABRT
"""The code noted for a rank that SIGABRT ended.

It explains nothing if another rank was killed: NCCL's watchdog aborts ranks that have lost a peer.
"""
JOINED = "a node joined"


class Recovery:
    """Track, on one node, the time from the end of a generation to the first step of the next."""

    def __init__(self, node: NodeContext, store: TCPStore) -> None:
        self._node = node
        self._store = store
        self._since: float | None = None  # when the last generation failed, until it is reported
        self._step = 0
        self._keys = list[str]()
        self._is_aborted = False
        self._why = ""
        self.request = ""
        """Why ranks asked for a restart, and what follows; "" if that did not end the last generation."""
        self.is_wrong = False
        """Whether they asked for it because the ranks of this node compute wrongly."""

    def connect(self, node: NodeContext, store: TCPStore) -> "Recovery":
        """Continue with another connection to the store; the recovery that is under way is still reported."""
        self._node = node
        self._store = store
        return self

    def failed(
        self,
        positions: Mapping[int, Position],
        prefix: str,
        codes: Mapping[int, int | None],
        aborted: Collection[int] = (),
        why: str = "",
    ) -> None:
        """Record that a generation of ranks {local rank: position} has ended, with these codes so far.

        `prefix`: that of the generation's keys in the store. `aborted`: the local ranks that SIGABRT ended.
        `why`: the cause, if the agent knows one that is not in the codes.
        """
        first = positions[0]
        key = f"{prefix}/killed/"
        self._since, self._step = time.monotonic(), self._node.view.rank_0_step()
        self.request = ""
        self.is_wrong = False
        self._keys = [f"{key}{node}" for node in range(first.nodes)]
        # Only if all others lost their peers: a rank that failed by itself explains the abort.
        self._is_aborted = bool(aborted) and all(
            rank in aborted or code in (None, PEER_LOST) for rank, code in codes.items()
        )
        killed = [
            (positions[rank].rank, ABORTED if rank in aborted else code)
            for rank, code in codes.items()
            if code and was_killed(code)
        ]
        # After an end that is not retried, no node reads it, and a frozen node 0 would delay the exit.
        if any(code not in (FINISHED, STOPPED) for code in codes.values()):
            with contextlib.suppress(RuntimeError):  # the store is gone, and so are its readers
                self._store.set(f"{key}{first.node_rank}", json.dumps(killed))
            # A rank that failed by itself explains the end of the others.
            if not any(code is not None and is_own(code) for code in codes.values()):
                self.request = self.requested(prefix)
                self._note_wrong_node(prefix, first.node_rank)
        self._why = why or self.request

    def _note_wrong_node(self, prefix: str, here: int) -> None:
        wrong = read(self._store, WrongNode)
        if wrong is None or wrong.prefix != prefix:
            return
        self.is_wrong = wrong.node == here
        # With spares, node 0 reports it once another node has the place.
        if self._node.placement.elastic is not None and self._node.placement.node_rank == 0:
            log.warning("node %d computes wrongly and is left out of the job", wrong.node)
            self._node.view.event("node_left_out", node=wrong.node, reason="computes wrongly")

    def has_lost_others(self, seconds: float = OTHERS_SECONDS) -> bool:
        """Return whether the ranks here were aborted because a rank of another node was killed or failed.

        That node's agent saw it before the watchdogs here; its message may take up to `seconds` to arrive.
        """
        deadline = time.monotonic() + seconds
        while self._is_aborted and len(self._keys) > 1:
            if any(code != ABORTED for _, _, code in self._killed()):
                return True
            if time.monotonic() > deadline:
                break
            time.sleep(MONITOR_SECONDS)
        return False

    def await_blame(self, prefix: str) -> dict[int, int]:
        """Wait, at most BLAME_SECONDS, for a failure other than a lost peer; return this node's failures.

        The kernel closes a rank's connections before its process ends, so its peers may end first.
        """
        deadline = running_clock.now() + BLAME_SECONDS
        while True:
            codes = self._node.workers.codes()
            failed = failures(codes)
            explained = any(code != PEER_LOST for code in failed.values())
            explained = explained or bool(self.requested(prefix))
            if explained or None not in codes.values() or running_clock.now() > deadline:
                return failed
            self._node.workers.pause(MONITOR_SECONDS)

    def requested(self, prefix: str) -> str:
        """Return why ranks of the generation at this prefix asked for a restart, and what follows, or ""."""
        notes = (newest_in(self._store), read(self._store, WrongNode))
        return next((str(note) for note in notes if note is not None and note.prefix == prefix), "")

    def with_smaller_batch(self, resume: ResumeDecision) -> ResumeDecision:
        """Return the decision with the micro-batch size that an earlier generation has left, if any."""
        found = newest_in(self._store)
        return resume if found is None else replace(resume, micro_batch=found.fits)

    def interrupted(self, number: int) -> None:
        """Log that a generation was ended for a waiting node: a new one, or one that lost a rank.

        A rank that computes for long, or is between two collectives, has not noticed the lost peer.
        """
        killed = ", ".join(_described(*each) for each in self._killed())
        known = killed or self._why
        level, why = (logging.WARNING, known) if known else (logging.INFO, "a node wants to join")
        log.log(level, "%s; restarting all ranks (generation %d)", why, number)

    def report_first_step(self, nodes: int) -> None:
        """Report on node 0, at the first step of the next generation, why ranks were restarted and its cost.

        `nodes`: how many take part in that generation. Which steps a script repeats is unknown, so its lost
        steps are not reported.
        """
        since = self._since
        self._since = None
        if since is None or self._node.placement.node_rank != 0:
            return
        seconds = time.monotonic() - since
        plan = self._node.view.plan
        lost = max(0, self._step - plan.step) if plan is not None else None
        cost = "" if lost is None else f", {pluralize(lost, 'step')} lost"
        again = f"training again after {format_duration(seconds)}{cost}"
        fields = {"seconds": round(seconds, 1), **({} if lost is None else {"steps_lost": lost})}
        killed = self._killed()
        if self._why and all(code == ABORTED for _, _, code in killed):
            killed = []  # by NCCL's watchdog, which saw only the consequence
        for rank, node, code in killed:
            log.warning("%s; %s", _described(rank, node, code), again)
            who = {"rank": rank, "node": node, "signal": signal_name(shell_code(code))}
            self._node.view.event("rank_killed", **who, **fields)
        if not killed:
            why = self._why or self._cause_among(nodes)
            log.log(logging.INFO if why == JOINED else logging.WARNING, "%s; %s", why, again)
            self._node.view.event("recovered", cause=why, **fields)

    def _cause_among(self, nodes: int) -> str:
        """Return why a generation ended in which no rank was killed, failed or hung.

        The agents that saw its end have written something; the others were killed or lost their connection.
        """
        with contextlib.suppress(RuntimeError):
            lost = [str(node) for node, key in enumerate(self._keys) if not self._store.check([key])]
            if lost:
                return f"node {lost[0]} was lost" if len(lost) == 1 else f"nodes {', '.join(lost)} were lost"
        return JOINED if nodes > len(self._keys) else "the ranks lost their connections"

    def _killed(self) -> list[tuple[int, int, int]]:
        """Return (rank, node, code) of the killed ranks that agents have reported."""
        found = []
        with contextlib.suppress(RuntimeError, ValueError, TypeError):
            for node, key in enumerate(self._keys):
                if self._store.check([key]):
                    found += [(int(rank), node, int(code)) for rank, code in json.loads(self._store.get(key))]
        return [each for each in found if each[2] != ABORTED] or found


def _described(rank: int, node: int, code: int) -> str:
    if code == GPU_FAILED:
        return f"the GPU of rank {rank} on node {node} failed"
    return f"rank {rank} on node {node} was killed ({signal_name(shell_code(code))})"


# Show on node 0's terminal the logs of ranks that ended twice in the same way at the same step.
#
# A failure that recurs at one step has a cause. A rank that is killed or aborts writes its last output to its
# own log, on its own node, and the other nodes only notice that it is gone. Restarts would hide the cause
# until their budget is spent.

Words = tuple[Cause, str]
"""How a rank ended, and where it was then."""


class RepeatedFailures:
    """Detect that a generation failed with the same code and step as the previous one, and log the cause."""

    def __init__(self, node: NodeContext, store: TCPStore) -> None:
        self._node = node
        self._store = store
        self._last: tuple[int, int] | None = None

    def ended(
        self,
        code: int,
        positions: Mapping[int, Position],
        prefix: str,
        grant: Grant,
        codes: Mapping[int, int],
    ) -> None:
        """Record how a generation ended: this node's `code`, and its ranks' `codes` by local rank.

        `positions` and `grant`: those of the generation's ranks. `prefix`: see `Recovery.failed`.
        """
        first = positions[0]
        key = f"{prefix}/words/"
        own_causes = [
            self._words(positions[rank], grant, code)
            for rank, code in codes.items()
            if rank in positions and code not in (FINISHED, STOPPED)
        ]
        with contextlib.suppress(RuntimeError):  # the store is gone, and so are its readers
            serialized = [[cause.to_json(), where] for cause, where in own_causes]
            self._store.set(f"{key}{first.node_rank}", json.dumps(serialized))
        this = code, self._node.view.rank_0_step()
        is_same = this == self._last
        self._last = this
        if is_same and first.node_rank == 0:
            self._show(own_causes + self._of_others(key, first.nodes))

    def _words(self, position: Position, grant: Grant, code: int) -> Words:
        path = self._node.run.rank_log(position.rank)
        words = last_words(error_file(grant, position.rank), path)
        lines = tuple(line for line in words if "frame #" not in line)
        cause = Cause(position.rank, position.node_rank, position.node_name, code, lines)
        return cause, self._node.view.describe_position(position.rank)

    def _of_others(self, prefix: str, nodes: int) -> list[Words]:
        """Return the causes that the other nodes write within OTHERS_SECONDS."""
        found = list[Words]()
        missing = set(range(1, nodes))
        deadline = time.monotonic() + OTHERS_SECONDS
        with contextlib.suppress(RuntimeError):
            while missing and time.monotonic() < deadline:
                for node in [each for each in missing if self._store.check([f"{prefix}{each}"])]:
                    missing.discard(node)
                    with contextlib.suppress(
                        ValueError, TypeError, AttributeError
                    ):  # any client of the store can write there
                        parsed = json.loads(self._store.get(f"{prefix}{node}"))
                        found += [(Cause.from_json(cause), str(where)[:100]) for cause, where in parsed]
                time.sleep(MONITOR_SECONDS * bool(missing))
        return found

    def _show(self, words: list[Words]) -> None:
        """Log the ends of the ranks that did more than lose their peers, or of all if there are none."""
        own = [each for each in words if each[0].code != PEER_LOST] or words
        for cause, where in own:
            lines = "\n  ".join(["", *cause.lines])
            log.warning("the same failure a second time: %s %s; end of its log:%s", cause, where, lines)
