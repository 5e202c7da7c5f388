"""Stop the ranks of a generation: they save and exit, or just exit if no step was finished.

See docs/architecture.md#a-sigterm.
"""

import logging

from tandem import running_clock
from tandem.errors import KILLED, STOPPED
from tandem.launch.node_context import NodeContext
from tandem.launch.rendezvous import StopRequestedError
from tandem.timeouts import MEET_TO_SAVE_SECONDS, START_STOP_SECONDS
from tandem.work.base import NOTHING, TRAINED

log = logging.getLogger("tandem.agent")


def is_time_to_save(node: NodeContext, has_trained: bool, waits_since: float | None) -> bool:
    """Return whether to start the ranks once more, despite a stop, so that they can save.

    Between two generations, node 0's memory may have steps that no checkpoint has. The limit is the time that
    ranks have to save and stop, and less if other nodes do not arrive (`waits_since`). A second Ctrl-C ends
    the attempt.
    """
    if not has_trained or node.stop.at is None or node.stop.interrupts > 1:
        return False
    now = running_clock.now()
    if waits_since is not None and now - max(waits_since, node.stop.at) > MEET_TO_SAVE_SECONDS:
        return False
    return now - node.stop.at < node.config.shutdown_timeout


class Stopping:
    """Handle a stop from the signal on: what is logged, and how long to wait for the ranks.

    Ranks react to a stop after a step. Before the first one there is nothing to save, and what they are doing
    (loading data, building a model, waiting for each other) may take minutes, so they are killed at once.
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
