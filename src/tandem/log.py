"""Set up logging, here only: other modules call `logging.getLogger("tandem")` and log.

Text is for people (`14:02:07 rank 0 | resumed from step 500`), even in a file. JSON lines are for log
collectors, and have to be requested (`--log-format json`; tandem's Kubernetes manifests do).
"""

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Any, TextIO

from tandem import rotation
from tandem.errors import ConfigError, text_of
from tandem.text import with_type
from tandem.timeouts import SILENCE_SECONDS, SOON_SECONDS

log = logging.getLogger("tandem.start")

LOGGER_NAME = "tandem"
CLEAR = "\r\x1b[K"
PLAIN = "\x1b[0m"
COLORS = {logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m", logging.CRITICAL: "\x1b[31m"}
LEVEL_VARIABLE = "TANDEM_LOG_LEVEL"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING}
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def level() -> int:
    """Return the level of lines on the terminal: TANDEM_LOG_LEVEL, which -v and -q set.

    Raises ConfigError for an invalid value.
    """
    name = os.environ.get(LEVEL_VARIABLE) or "info"
    if name not in LEVELS:
        raise ConfigError(f"{LEVEL_VARIABLE}: invalid value {name!r}; expected one of {', '.join(LEVELS)}")
    return LEVELS[name]


def is_quiet() -> bool:
    """Return True if only warnings and errors are wanted."""
    return level() > logging.INFO


def setup(
    path: Path | None, rank: int | None, node: int, to_terminal: bool, json_lines: bool
) -> logging.Logger:
    """Send the "tandem" logger to a file (appending), to stderr, to both or to neither.

    A `rank` of None is the node's agent. A second call, for example after a rank number has changed, closes
    the handlers of the first. Raises ConfigError if the file cannot be opened.
    """
    logger = logging.getLogger(LOGGER_NAME)
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handlers: list[logging.Handler] = []
    wanted = level()
    if path is not None:
        handlers.append(_file_handler(path))
    if to_terminal:
        is_brief = path is not None and not json_lines and wanted > logging.DEBUG
        handlers.append(TerminalHandler(keeps_to_file=is_brief))
        # Stderr may be a log file, and -q is for terminals.
        handlers[-1].setLevel(logging.DEBUG if writes_to_file() else wanted)
    formatter = JsonFormatter(rank, node) if json_lines else TextFormatter(rank, node)
    for handler in handlers or [logging.NullHandler()]:
        handler.setFormatter(formatter)
        logger.addHandler(handler)
    logger.setLevel(min(wanted, logging.INFO))  # a file also has the lines that -q hides from the terminal
    # A script's handlers at the root logger would print each line again.
    logger.propagate = False
    return logger


def redirect_output(path: Path) -> None:
    """Append this process's stdout and stderr to `path`, including native code's. Raises OSError.

    From now on, `renew_outputs` keeps the file bounded.
    """
    # O_APPEND: other processes write to this file, too.
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(descriptor, stream.fileno())
    os.close(descriptor)
    survive_closed_terminal()  # nor may a full disk end a program that prints
    keep_bounded(path, *(stream.fileno() for stream in (sys.stdout, sys.stderr)))


def writes_to_file() -> bool:
    """Return whether `redirect_output` sent this process's output, or its parent's, to a file."""
    return bool(_outputs)


class ClosableStream:
    """A terminal or pipe that may be closed. Output after that is lost, which is not an error of the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def survive_closed_terminal() -> None:
    """Let this process and its forks survive writes to a terminal or pipe that was closed.

    Examples are `| head`, a pager that the user left, and a closed terminal window.
    """
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        if not isinstance(stream, ClosableStream):
            setattr(sys, name, ClosableStream(stream))


_outputs: list[rotation.Output] = []
_one_at_a_time = threading.Lock()


def keep_bounded(path: Path, *descriptors: int) -> None:
    """Bound `path`, to which `descriptors` append: rotate it now and in `renew_outputs` if it is full."""
    _outputs[:] = [rotation.Output(path, *descriptors)]
    renew_outputs()


def renew_outputs() -> None:
    """Move this process's output to a new file if the current one is full.

    The thread that sends heartbeats calls this from time to time.
    """
    with _one_at_a_time:
        for output in _outputs:
            output.renew()


def _not_through_a_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _file_handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A file name may have bytes that are not UTF-8, which must not break the log.
        return FileHandler(path, mode="a", encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(
            f"cannot write the log {path}: {reason}; use a --run-dir that you can write to"
        ) from error


class FileHandler(logging.FileHandler):
    """A handler that starts a new file when its own is full or was put aside by another process.

    It does not follow a link, which may lead to another run's log. An error such as a full disk is reported
    once, on the terminal.
    """

    _has_failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self._has_failed:
            self._has_failed = True
            text = f"cannot write the log {self.baseFilename}: {error.strerror or error}"
            warning = logging.makeLogRecord({"levelno": logging.WARNING, "levelname": "WARNING", "msg": text})
            for other in logging.getLogger(LOGGER_NAME).handlers:
                if isinstance(other, TerminalHandler):
                    other.handle(warning)

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", -1, "utf-8", "backslashreplace", opener=_not_through_a_link)

    def emit(self, record: logging.LogRecord) -> None:
        path = Path(self.baseFilename)
        if self.stream is not None and rotation.rotate_if_full(
            path, self.stream.fileno(), rotation.LOG_BYTES
        ):
            with suppress(OSError):  # it stays with the older one, and tries again
                before = self.stream
                self.stream = self._open()
                before.close()
        super().emit(record)


class TerminalHandler(logging.StreamHandler[TextIO]):
    """Write lines to stderr, and let a progress bar or similar make way for each.

    A record's `detail` (text in `extra`) goes to the log file only, if there is one.
    """

    def __init__(self, keeps_to_file: bool = False) -> None:
        super().__init__(sys.stderr)
        self._keeps_to_file = keeps_to_file
        self.spoke_at = time.monotonic()
        self.way: Callable[[], AbstractContextManager[None]] = nullcontext

    def emit(self, record: logging.LogRecord) -> None:
        if self._keeps_to_file and hasattr(record, "detail"):
            record = logging.makeLogRecord({**vars(record), "detail": ""})
        with self.way():
            super().emit(record)
        self.spoke_at = time.monotonic()

    def format(self, record: logging.LogRecord) -> str:
        """Clear the terminal's line first: another process may have drawn a progress bar there."""
        text = super().format(record)
        if not self.stream.isatty() or is_dumb() or isinstance(self.formatter, JsonFormatter):
            return text
        # no-color.org: any value turns colors off, but an empty one does not count.
        color = "" if os.environ.get("NO_COLOR") else COLORS.get(record.levelno, "")
        return f"{CLEAR}{color}{text}{color and PLAIN}"


def last_line_at() -> float | None:
    """Return when this process last wrote to the terminal, or could have (monotonic seconds).

    None means that it never writes there. A progress bar counts as permanent output.
    """
    handlers = [each for each in logging.getLogger(LOGGER_NAME).handlers if isinstance(each, TerminalHandler)]
    if any(each.way is not nullcontext for each in handlers):
        return time.monotonic()
    return max((each.spoke_at for each in handlers), default=None)


def is_dumb() -> bool:
    """Return whether the terminal supports no escape sequences."""
    return os.environ.get("TERM") == "dumb"


def wrap_terminal_lines(way: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter `way()` around each line that goes to the terminal from now on."""
    for handler in logging.getLogger(LOGGER_NAME).handlers:
        if isinstance(handler, TerminalHandler):
            handler.way = way


class TextFormatter(logging.Formatter):
    """`14:02:07 rank 0 | message` in local time; levels other than INFO are named.

    A record with `table` ({name: text} in `extra`) has one more line for each entry.
    """

    def __init__(self, rank: int | None, node: int) -> None:
        super().__init__()
        self._who = f"node {node}" if rank is None else f"rank {rank}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        detail = f": {text}" if (text := getattr(record, "detail", "")) else ""
        line = f"{self.formatTime(record, '%H:%M:%S')} {self._who} | {level}{record.message}{detail}"
        table: Mapping[str, str] = getattr(record, "table", {})
        width = max(map(len, table), default=0)
        return "\n".join([line, *(f"  {name:<{width}}  {text}" for name, text in table.items())])


class JsonFormatter(logging.Formatter):
    """One object per line: time (UTC), level, rank, node, step, message, then the fields of `extra`."""

    def __init__(self, rank: int | None, node: int) -> None:
        super().__init__()
        self._rank = rank
        self._node = node

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "rank": self._rank,
            "node": self._node,
            "step": getattr(record, "step", None),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        for key, value in vars(record).items():
            if key not in _STANDARD_FIELDS and line.get(key) is None:
                line[key] = value
        # A field that JSON does not have must not lose the line.
        return json.dumps(line, default=str, ensure_ascii=False)


@contextmanager
def reporting(what: str) -> Iterator[None]:
    """Log an error in this block as a warning, because the block only reports on a run that has ended."""
    try:
        yield
    except Exception as error:
        message = with_type(error)
        logging.getLogger(LOGGER_NAME).warning(
            "cannot %s (%s); this does not change the run's exit code", what, message
        )


def log_warnings() -> None:
    """Log Python's warnings from now on, on the terminal and in the file."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = text_of(message) if isinstance(message, Warning) else message
        logger = logging.getLogger(f"{LOGGER_NAME}.python")
        logger.warning("%s: %s (%s line %d)", category.__name__, text, filename, lineno)

    warnings.showwarning = show


def printable(text: str, longest: int = sys.maxsize) -> str:
    """Return untrusted text as one line that any terminal can print, shortened to `longest`."""
    shown = "".join(each if each.isprintable() else " " for each in text[:longest])
    return shown if len(text) <= longest else f"{shown[:-1]}…"


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: 1 rank, 2 ranks."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


# Log what a slow start is doing: one line when it has been silent, none in a quick start.


JOIN_SECONDS = 1.0


@contextmanager
def log_if_slow(doing: str, silence: float = SILENCE_SECONDS, soon: float = SOON_SECONDS) -> Iterator[None]:
    """Log `still DOING` ("importing torch") once if nothing is logged for `silence` seconds.

    The silence begins with the last line before the block. A block shorter than `soon` logs nothing. Any
    other line in the block ends the watch. The thread has ended when the block is left, because code after
    it may fork.
    """
    before, closing = last_line_at(), threading.Event()

    def watch(seconds: float) -> None:
        if not closing.wait(seconds) and last_line_at() == before:
            log.info("still %s", doing)

    # This process never writes to a terminal, so no silence is noticed.
    if before is None:
        yield
        return
    left = max(soon, before + silence - time.monotonic())
    thread = threading.Thread(target=watch, args=(left,), name="tandem-silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        # Limited, because a signal handler that raises inside logging leaves its lock locked.
        thread.join(JOIN_SECONDS)
