"""Show rank 0's progress: a bar on a terminal, else log lines, and TensorBoard files."""

import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from tandem.errors import ConfigError
from tandem.log import ClosableStream, is_dumb, is_quiet, wrap_terminal_lines
from tandem.timeouts import BAR_SECONDS

# The progress bar on a terminal, drawn by rich if it is installed (extra: rich), else by tqdm.
#
# The training thread draws it a few times a second; the bar needs no other thread. It is one line, narrower
# than the terminal, so that the next writer can clear it (see `log.py`).

NARROWEST_BAR = 8
NARROW = 72
"""Number of columns needed for tqdm's whole line."""


class Bar(Protocol):
    """A progress bar.

    `advance` sets the step (cheap), `say` the text, `redrawn_below` makes room for a log line, and `close` is
    called once.
    """

    def advance(self, step: int) -> None: ...
    def say(self, epoch: int, loss: float, samples_per_second: float) -> None: ...
    def redrawn_below(self) -> Any: ...
    def close(self) -> None: ...


def open_bar(total: int, initial: int, stream: Any) -> Bar:
    """Open a bar of `total` steps, of which `initial` are done."""
    # rich draws with escape sequences, which a file or a dumb terminal would show as text.
    if stream.isatty() and not is_dumb():
        try:
            return RichBar(total, initial, stream)
        except ImportError:
            pass
    return TqdmBar(total, initial, stream)


class TqdmBar:
    """A bar drawn by tqdm, without color."""

    def __init__(self, total: int, initial: int, stream: Any) -> None:
        from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]

        class Quiet(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
            monitor_interval = 0  # no monitor thread: nothing here needs one

        # tqdm's own lock creates a POSIX semaphore, which needs /dev/shm and is reported as leaked after
        # _exit.
        Quiet.set_lock(threading.RLock())
        self._is_narrow = 0 < _columns(stream) < NARROW
        self._bar: Any = Quiet(
            total=total,
            initial=initial,
            file=stream,
            unit="step",
            dynamic_ncols=True,
            mininterval=BAR_SECONDS,
            bar_format="{l_bar}{bar}|{postfix}" if self._is_narrow else None,
        )
        self.redrawn_below = partial(self._bar.external_write_mode, file=stream)

    def advance(self, step: int) -> None:
        self._bar.update(step - self._bar.n)

    def say(self, epoch: int, loss: float, samples_per_second: float) -> None:
        text = f"epoch {epoch}, loss {loss:.4f}, {samples_per_second:,.0f} samples/s"
        self._bar.set_postfix_str(f"loss {loss:.4f}" if self._is_narrow else text, refresh=False)

    def close(self) -> None:
        self._bar.close()


class RichBar:
    """A bar drawn by rich, with as many parts as fit; colors follow NO_COLOR and TERM.

    It hides and moves nothing on the terminal, so a killed rank leaves the terminal intact. Raises
    ImportError.
    """

    def __init__(self, total: int, initial: int, stream: Any) -> None:
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        self._console = Console(file=stream, highlight=False)
        self._stream = stream
        self._progress_bar = ProgressBar
        self._text = Text
        self._total = total
        self._first = initial
        self._step = initial
        self._began = time.monotonic()
        self._next_draw = 0.0
        self._epoch = ""
        self._loss = ""
        self._pace = ""
        # Reentrant, because `redrawn_below` draws while it holds the lock.
        self._lock = threading.RLock()
        self._draw()

    def advance(self, step: int) -> None:
        self._step = step
        if time.monotonic() >= self._next_draw:
            self._draw()

    def say(self, epoch: int, loss: float, samples_per_second: float) -> None:
        self._epoch = f"epoch {epoch}"
        self._loss = f"loss {loss:.4f}"
        self._pace = f"{samples_per_second:,.0f} samples/s"

    @contextmanager
    def redrawn_below(self) -> Iterator[None]:
        """Redraw the bar below a log line; the log clears the bar's line itself."""
        with self._lock:
            yield
            self._draw()

    def close(self) -> None:
        with self._lock:
            self._draw()
            self._stream.write("\n")
            self._stream.flush()

    def _draw(self) -> None:
        with self._lock:
            self._next_draw = time.monotonic() + BAR_SECONDS
            # A full line would wrap on some terminals, and \r returns only to the start of its last row.
            width = self._console.width - 1
            parts = self._parts(width - NARROWEST_BAR)
            used = sum(len(text) + 2 for text, _ in parts)
            bar = self._progress_bar(self._total, self._step, width=max(1, min(width - used, 60)))
            # Capture it and write it in one call, so that no other writer comes between the parts.
            with self._console.capture() as drawn:
                self._console.print(bar, end="")
                text = self._text.assemble(*((f"  {text}", style) for text, style in parts))
                self._console.print(text, end="", no_wrap=True, overflow="crop")
            # Clear the line first, because the new text may be shorter.
            self._stream.write(f"\r\x1b[K{drawn.get()}")
            self._stream.flush()

    def _parts(self, room: int) -> list[tuple[str, str]]:
        """Return the (text, style) parts that fit into `room` columns; drop the least important first."""
        parts = [
            (f"{self._step / max(1, self._total):.0%}", "bold", 0),
            (f"{self._step:,}/{self._total:,}", "cyan", 3),
            (self._epoch, "", 5),
            (self._loss, "magenta", 1),
            (self._pace, "green", 4),
            (self._left(), "dim", 2),
        ]
        parts = [each for each in parts if each[0]]
        while sum(len(text) + 2 for text, _, _ in parts) > room and len(parts) > 1:
            parts.remove(max(parts, key=lambda each: each[2]))
        return [(text, style) for text, style, _ in parts]

    def _left(self) -> str:
        """Format the remaining time, at the average pace since the bar started."""
        done = self._step - self._first
        spent = time.monotonic() - self._began
        return f"{clock(spent / done * (self._total - self._step))} left" if done else ""


def _columns(stream: Any) -> int:
    """Return the width of the terminal; 0 if unknown."""
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 0


def clock(seconds: float) -> str:
    """Format seconds as 0:12, 3:04 or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


# The progress display of rank 0: a bar on a terminal, else one log line per interval.

logger = logging.getLogger("tandem")

SHOWN = 4
"""Number of a custom loop's values to show on a line; metrics.jsonl has all of them."""


class Progress:
    """The progress display.

    Call `advance` after each step (cheap), `report` once per log interval, and `note` for a line in between.
    Mode auto: a bar if `stream` is a terminal, unless -q is given; on: a bar; off: only log lines.
    """

    def __init__(
        self, steps_planned: int, *, start_step: int = 0,
        mode: Literal["auto", "on", "off"] = "auto", stream: TextIO | None = None,
    ) -> None:  # fmt: skip
        self._steps_planned = steps_planned
        self._stream: Any = ClosableStream(sys.stderr if stream is None else stream)
        self._step = start_step
        self._bar: Bar | None = None
        has_bar = mode == "auto" and self._stream.isatty() and not is_dumb() and not is_quiet()
        if mode == "on" or has_bar:
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
        else:
            of = f"step {step:,} of {self._steps_planned:,} (epoch {epoch})"
            shown = [f"{name} {value:.4g}" for name, value in (more or {}).items()][:SHOWN]
            text = ", ".join([f"loss {loss:.4f}", *shown, f"{samples_per_second:,.0f} samples/s"])
            logger.info("%s: %s", of, text)

    def note(self, text: str) -> None:
        """Write one log line."""
        logger.info("%s", text)

    def close(self) -> None:
        """Leave the bar on the terminal; safe to call twice."""
        if self._bar is not None:
            # Before the bar is closed, because a log line would draw it again.
            wrap_terminal_lines(nullcontext)
            self._bar.close()
            self._bar = None


# TensorBoard event files (extra: tensorboard).


class EventWriter:
    """Writes scalars in `directory`; hides an earlier launch's events at `purge_step` and later.

    Raises ConfigError if TensorBoard is not installed. A failed write is logged once and never raises
    OSError.
    """

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tracker tensorboard needs TensorBoard, which cannot be imported ({error}); "
                "run: pip install 'tandem-train[tensorboard]', or omit --tracker tensorboard"
            ) from error
        self._failed = False
        # torch.utils.tensorboard has no annotations
        self._writer: Any = None
        with self._told_once():
            self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge_step)  # type: ignore[no-untyped-call,unused-ignore]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        with self._told_once():
            for name, value in values.items() if self._writer is not None else ():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._told_once():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write TensorBoard events (%s); training continues", error)
            self._failed = True
