"""What a stop is to the ranks of a generation: they save and end, or just end where no step was finished."""

import logging

from tandem import running
from tandem.errors import KILLED, STOPPED
from tandem.launch.part import Node
from tandem.launch.rendezvous import StopRequestedError
from tandem.timeouts import MEET_TO_SAVE_SECONDS, START_STOP_SECONDS

log = logging.getLogger("tandem.agent")

THERE = NOTHING, SAVED, TRAINED = "nothing", "saved", "trained"
"""What there is of a run when a generation begins: nothing; the checkpoint that it goes on from; or more, in
the memory of node 0, which a stop must not lose."""


def what_there_is(node: Node) -> str:
    """Node 0 says it for all."""
    if node.view.plan is not None:
        return TRAINED
    return SAVED if node.resume.kind == "resume" else NOTHING


def is_time_to_save(node: Node, has_trained: bool, waits_since: float | None) -> bool:
    """Whether ranks are started once more though this node was asked to stop: only then can they save.

    Between two generations node 0's memory may have steps that no checkpoint has. It is the same time that
    ranks have to save and stop, less for nodes that do not come (`waits_since`); a second Ctrl-C ends it.
    """
    if not has_trained or node.stop.at is None or node.stop.interrupts > 1:
        return False
    now = running.now()
    if waits_since is not None and now - max(waits_since, node.stop.at) > MEET_TO_SAVE_SECONDS:
        return False
    return now - node.stop.at < node.config.shutdown_timeout


class Stopping:
    """From the signal on: what is said to a person, and how long the ranks are waited for.

    They hear a stop at a step. Before the first one there is nothing to be saved, and what they are at (data,
    a model, a wait for each other) may take minutes: they are ended at once.
    """

    def __init__(self, node: Node, what_there_is: str) -> None:
        self._node, self._there = node, what_there_is
        self._since, self._has_said = node.stop.at or running.now(), False

    def code(self, has_trained: bool) -> int | None:
        """What the generation ends with, if it is to end now. Raises StopRequestedError: nothing is saved."""
        seconds, name = running.now() - self._since, self._node.stop.name
        limit = self._node.config.shutdown_timeout
        if not self._has_said and (has_trained or self._there == TRAINED):
            self._has_said = True
            asked = f"asking all ranks to save and stop (up to {limit:.0f} s)"
            log.info("%s: %s; press Ctrl-C again to kill them", name, asked)
        if not self._has_said and seconds > START_STOP_SECONDS:
            self._node.workers.kill()
            if self._there == NOTHING:
                raise StopRequestedError
            step, said = self._node.resume.step, "nothing to save; run the same command again to resume from"
            where = f"step {step:,}" if step else "the newest checkpoint"
            log.info("%s came before the first step; %s %s", name, said, where)
            return STOPPED
        if seconds > limit:
            log.warning("ranks did not stop within %.0f s: killing them", limit)
            return KILLED
        return None
