"""Handle a stop of a rank without an agent, which has to report it and to end what blocks it.

See docs/architecture.md#a-sigterm.
"""

import logging
import time
from collections.abc import Callable

from tandem.checkpoint.listing import newest_step
from tandem.distributed.group import Position
from tandem.errors import INTERRUPTED_TWICE, KILLED, STOPPED
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.text import format_duration, shown
from tandem.timeouts import MONITOR_SECONDS, START_STOP_SECONDS

log = logging.getLogger("tandem.run")


class LoneStop:
    """Report at the first signal what will be saved; end the process if nothing can be.

    A second Ctrl-C also ends it.

    `leave(code, reason)` ends the process at once. Both callbacks run in the flag's own thread, so they work
    while the main thread is blocked in C.
    """

    def __init__(
        self, stop: StopFlag, run: RunDir, position: Position, leave: Callable[[int, str], None]
    ) -> None:
        self._stop = stop
        self._position = position
        self._leave = leave
        self._run = run
        self.is_over = False
        """Whether the run has ended and only its result remains to be shown."""
        stop.is_torchruns = position.platform == "torchrun"
        stop.listen(self._first_signal, self._second_signal)

    def _first_signal(self) -> None:
        if self.is_over:
            return
        deadline = time.monotonic() + START_STOP_SECONDS
        # Training may be about to take its first step, after which it can save.
        while not self._stop.is_polled and time.monotonic() < deadline:
            time.sleep(MONITOR_SECONDS)
        if not self._stop.is_polled:
            self._end_before_a_step()
        if self._position.rank == 0:
            text = "%s: finishing the current step, then saving to %s/checkpoints (%s); %s"
            again = "press Ctrl-C again to exit now"
            log.info(text, self._stop.name, shown(self._run.where), self._expected_duration(), again)

    def _expected_duration(self) -> str:
        """Return what is known in advance about the duration of the save."""
        took = [event.get("seconds") for event in self._run.events() if event.get("kind") == "checkpoint"]
        message = (
            f"the last save took {format_duration(float(took[-1]))}" if took and took[-1] is not None else ""
        )
        limit = "torchrun allows 30 s" if self._position.platform == "torchrun" else ""
        return ", ".join(filter(None, [message, limit])) or "one step and one save"

    def _end_before_a_step(self) -> None:
        says = f"{self._stop.name} came before the first step; nothing to save"
        saved = self._position.resume.kind == "resume" or newest_step(self._run.checkpoints) is not None
        if saved:
            says = f"{says}; run the same command again to resume from the newest checkpoint"
        if self._position.rank == 0:
            log.info("%s", says)
        self._leave(STOPPED if saved else KILLED, says)

    def _second_signal(self) -> None:
        newest = newest_step(self._run.checkpoints)
        kept = "there is no checkpoint" if newest is None else f"the newest checkpoint is step {newest:,}"
        if self._position.rank == 0:
            log.warning("second Ctrl-C: exiting now; %s", kept)
        self._leave(INTERRUPTED_TWICE, "second Ctrl-C")
