"""Stop the ranks of a generation: they save and exit, or just exit if no step was finished.

See docs/architecture.md#a-sigterm.
"""

import contextlib
import logging
import time
from collections.abc import Callable

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from tandem import running_clock
from tandem.errors import FINISHED, KILLED, PEER_LOST, STOPPED, StuckError
from tandem.launch.node_context import NodeContext
from tandem.launch.rendezvous import (
    JOB_RESULT_KEY,
    LEFT_KEY,
    JobEndedError,
    StopRequestedError,
    job_end_in,
    publish_job_result,
    stay_until_all_left,
)
from tandem.launch.rendezvous_state import others_live
from tandem.timeouts import (
    LEAVE_SECONDS,
    MEET_TO_SAVE_SECONDS,
    MEMBERSHIP_SECONDS,
    MONITOR_SECONDS,
    START_STOP_SECONDS,
    WAITING_WORD_SECONDS,
)
from tandem.work.base import NOTHING, TRAINED, Cause

log = logging.getLogger("tandem.agent")


def is_time_to_save(node: NodeContext, has_trained: bool, waits_since: float | None) -> bool:
    """Return whether to start the ranks once more, despite a stop, so that they can save.

    Between two generations, node 0's memory may have steps that no checkpoint has. The limit is the time that
    ranks get to save and stop, or less if nodes do not arrive (`waits_since`). A second Ctrl-C ends it.
    """
    if not has_trained or node.stop.at is None or node.stop.interrupts > 1:
        return False
    now = running_clock.now()
    if waits_since is not None and now - max(waits_since, node.stop.at) > MEET_TO_SAVE_SECONDS:
        return False
    return now - node.stop.at < node.config.shutdown_timeout


def await_end_of_ranks(node: NodeContext) -> None:
    """Wait until no process of the last generation is left; `Workers.kill` has logged those that remain.

    A process that is stuck in the kernel may hold a GPU's memory or a port that the next generation
    needs. Raises StuckError if it is still there after --master-timeout, and StopRequestedError.
    """
    deadline = time.monotonic() + node.config.master_timeout
    while left := node.workers.left():
        if node.stop:
            raise StopRequestedError
        if time.monotonic() > deadline:
            raise StuckError(f"{', '.join(map(str, left))} cannot be killed; reboot this machine")
        node.lease.check()
        time.sleep(MEMBERSHIP_SECONDS)


class Stopping:
    """Handle a stop request: log it, and decide how long to wait for the ranks.

    Ranks react to a stop at the end of a step. Before the first step there is nothing to save, and loading
    data, building a model or waiting for other ranks may take minutes. So the ranks are then killed at once.
    """

    def __init__(self, node: NodeContext, progress: str) -> None:
        self._node = node
        self._progress = progress
        self._since = node.stop.at or running_clock.now()
        self._has_said = False

    def code(self, has_trained: bool) -> int | None:
        """Return the code that ends the generation, or None to keep waiting.

        Raises StopRequestedError if nothing is saved at all.
        """
        seconds = running_clock.now() - self._since
        name = self._node.stop.name
        limit = self._node.config.shutdown_timeout
        if not self._has_said and (has_trained or self._progress == TRAINED):
            self._has_said = True
            asked = f"asking all ranks to save and stop (up to {limit:.0f} s)"
            log.info("%s: %s; press Ctrl-C again to kill them", name, asked)
        if not self._has_said and seconds > START_STOP_SECONDS:
            self._node.workers.kill()
            if self._progress == NOTHING:
                raise StopRequestedError
            step = self._node.resume.step
            advice = "nothing to save; run the same command again to resume from"
            where = f"step {step:,}" if step else "the newest checkpoint"
            log.info("%s came before the first step; %s %s", name, advice, where)
            return STOPPED
        if seconds > limit:
            log.warning("ranks did not stop within %.0f s: killing them", limit)
            return KILLED
        return None


# Agree among the nodes how the job of a program ended: each node sees only its own ranks.
#
# For a task, the checkpoints show whether the job is done, and each rank reports why it failed.

CAUSE_KEY = "tandem/cause"


def await_other_nodes(
    node: NodeContext, store: TCPStore, handler: DynamicRendezvousHandler, prefix: str, nodes: int
) -> None:
    """Wait on node 0 until the ranks of all nodes have succeeded; the ranks here have.

    `prefix` is that of the generation's keys in the store, and `nodes` how many took part. Other nodes return
    at once. The wait lasts up to --master-timeout. Raises JobEndedError if other nodes end in another way.
    """
    config = node.config
    heard = running_clock.now()
    key = f"{prefix}/well"
    with contextlib.suppress(RuntimeError):
        store.add(key, 1)
    if node.placement.node_rank != 0:
        return
    # A node that is restarted meanwhile reads it and exits with 0. See
    # docs/architecture.md#user-scripts.
    publish_job_result(store, FINISHED, "")
    deadline = heard + config.master_timeout
    next_word = heard + WAITING_WORD_SECONDS
    is_stopped = False
    while (well := store.add(key, 0)) < nodes:
        # A failure replaces the success in the store, whichever node was first.
        if (result := job_end_in(store)) is not None and result.code != FINISHED:
            raise result
        now = running_clock.now()
        if others_live(handler, node.placement):
            heard = now
            node.view.last_progress = running_clock.now()
        # A stop during this wait must not take longer than ranks get to stop.
        if node.stop and not is_stopped:
            is_stopped = True
            deadline = min(deadline, now + config.shutdown_timeout)
        if now > min(deadline, heard + LEAVE_SECONDS) or node.stop.interrupts > 1:
            # No node may read a success any more.
            store.delete_key(JOB_RESULT_KEY)
            what = f"the ranks on {well} of {nodes} nodes finished, the others did not"
            why = "they may be lost, or need a longer --master-timeout"
            raise JobEndedError(STOPPED if node.stop else PEER_LOST, f"{what}; {why}")
        if now > next_word:
            next_word = deadline
            log.info("the ranks on this node finished; waiting for the other nodes")
        time.sleep(MONITOR_SECONDS)


def await_departures(
    node: NodeContext,
    store: TCPStore,
    handler: DynamicRendezvousHandler,
    seconds: float,
    should_stop: Callable[[], bool],
) -> None:
    """Record that this node leaves; on node 0, which has the store, wait up to `seconds` for the others.

    The wait also ends when a stop is requested or no other node is alive.
    """
    left = store.add(LEFT_KEY, 1)
    deadline = running_clock.now() + seconds
    nodes = node.placement.nodes
    while node.placement.node_rank == 0 and left < nodes:
        left = stay_until_all_left(store, nodes, left, should_stop=should_stop)
        if node.stop or running_clock.now() > deadline or not others_live(handler, node.placement):
            return
        node.view.last_progress = running_clock.now()


def leave_cause(store: TCPStore, cause: Cause) -> str:
    """Tell the other nodes why the ranks here failed, and return it for this node."""
    with contextlib.suppress(RuntimeError):
        store.set(CAUSE_KEY, cause.to_json())
    return _described(cause)


def cause_in(store: TCPStore, node_rank: int) -> str:
    """Return why ranks of another node failed, in full on node 0; empty if no node has reported a cause."""
    with contextlib.suppress(RuntimeError, ValueError):
        if store.check([CAUSE_KEY]):
            cause = Cause.from_json(store.get(CAUSE_KEY))
            return _described(cause) if node_rank == 0 else str(cause)
    return ""


def _described(cause: Cause) -> str:
    """Return the cause with its traceback, unless rank 0 has shown that on node 0's terminal already."""
    return cause.in_one_line() if cause.rank == 0 else cause.with_traceback()
