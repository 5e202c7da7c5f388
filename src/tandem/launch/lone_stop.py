"""What a stop is to a rank without an agent: nobody else says what happens, or ends what is in its way."""

import logging
import time
from collections.abc import Callable

from tandem.checkpoint.listing import newest_step
from tandem.distributed.group import Position
from tandem.errors import INTERRUPTED_TWICE, KILLED, STOPPED
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.timeouts import MONITOR_SECONDS, START_STOP_SECONDS
from tandem.words import lasting, shown

log = logging.getLogger("tandem.run")


class LoneStop:
    """Says at the first signal what is saved, and ends the process where nothing is, or at a second Ctrl-C.

    `leave(code, reason)` ends it at once; both come from the flag's own thread.
    """

    def __init__(
        self, stop: StopFlag, run: RunDir, position: Position, leave: Callable[[int, str], None]
    ) -> None:
        self._stop, self._position, self._leave = stop, position, leave
        self._run = run
        self.is_over = False
        """Whether the run has ended: what is left is to show it."""
        stop.is_torchruns = position.platform == "torchrun"
        stop.listen(self._first, self._second)

    def _first(self) -> None:
        if self.is_over:
            return
        deadline = time.monotonic() + START_STOP_SECONDS
        while not self._stop.is_heeded and time.monotonic() < deadline:
            time.sleep(MONITOR_SECONDS)
        if not self._stop.is_heeded:
            self._end_before_a_step()
        if self._position.rank == 0:
            text = "%s: finishing the current step, then saving to %s/checkpoints (%s); %s"
            again = "press Ctrl-C again to exit now"
            log.info(text, self._stop.name, shown(self._run.where), self._how_long(), again)

    def _how_long(self) -> str:
        """What is known of it in advance."""
        took = [event.get("seconds") for event in self._run.events() if event.get("kind") == "checkpoint"]
        said = f"the last save took {lasting(float(took[-1]))}" if took and took[-1] is not None else ""
        limit = "torchrun allows 30 s" if self._position.platform == "torchrun" else ""
        return ", ".join(filter(None, [said, limit])) or "one step and one save"

    def _end_before_a_step(self) -> None:
        says = f"{self._stop.name} came before the first step; nothing to save"
        saved = self._position.resume.kind == "resume" or newest_step(self._run.checkpoints) is not None
        if saved:
            says = f"{says}; run the same command again to resume from the newest checkpoint"
        if self._position.rank == 0:
            log.info("%s", says)
        self._leave(STOPPED if saved else KILLED, says)

    def _second(self) -> None:
        newest = newest_step(self._run.checkpoints)
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is step {newest:,}"
        if self._position.rank == 0:
            log.warning("second Ctrl-C: exiting now; %s", kept)
        self._leave(INTERRUPTED_TWICE, "second Ctrl-C")
