"""The progress display of rank 0: a bar on a terminal, else one log line per interval."""

import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, Literal, TextIO

from tandem.log import ClosableStream, is_dumb, is_quiet, wrap_terminal_lines
from tandem.telemetry.bars import Bar, open_bar

logger = logging.getLogger("tandem")

SHOWN = 4
"""How many values of a custom loop to show on a line; metrics.jsonl has all of them."""


class Progress:
    """The progress display.

    Call `advance` after each step (cheap), `report` once per log interval, and `note` for a line in between.
    Mode auto: a bar if `stream` is a terminal, unless -q is given; on: a bar; off: only log lines. Ranks
    other than 0 show nothing.
    """

    def __init__(
        self, steps_planned: int, *, start_step: int = 0, rank: int = 0,
        mode: Literal["auto", "on", "off"] = "auto", stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._steps_planned = steps_planned
        self._silent = rank != 0
        self._stream: Any = ClosableStream(sys.stderr if stream is None else stream)
        self._step = start_step
        self._bar: Bar | None = None
        has_bar = mode == "auto" and self._stream.isatty() and not is_dumb() and not is_quiet()
        if not self._silent and (mode == "on" or has_bar):
            self._bar = open_bar(steps_planned, start_step, self._stream)
            wrap_terminal_lines(self._bar.redrawn_below)

    def advance(self, step: int) -> None:
        """Set the number of finished steps."""
        if self._bar is not None and step > self._step:
            self._bar.advance(step)
        self._step = max(step, self._step)

    def report(
        self,
        step: int,
        *,
        epoch: int,
        loss: float,
        samples_per_second: float,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Show the interval that ended with `step` (finished steps), and SHOWN values of `more`."""
        self.advance(step)
        if self._bar is not None:
            self._bar.say(epoch, loss, samples_per_second)
        elif not self._silent:
            of = f"step {step:,} of {self._steps_planned:,} (epoch {epoch})"
            shown = [f"{name} {value:.4g}" for name, value in (more or {}).items()][:SHOWN]
            text = ", ".join([f"loss {loss:.4f}", *shown, f"{samples_per_second:,.0f} samples/s"])
            logger.info("%s: %s", of, text)

    def note(self, text: str) -> None:
        """Write one log line."""
        if not self._silent:
            logger.info("%s", text)

    def close(self) -> None:
        """Leave the bar on the terminal; safe to call twice."""
        if self._bar is not None:
            # Before the bar is closed, because a log line would draw it again.
            wrap_terminal_lines(nullcontext)
            self._bar.close()
            self._bar = None
