"""Turn stderr into JSON lines with `--log-format json`, including output of C++ code and scripts.

After a lost peer, torch and gloo print hundreds of lines of C++ frames. A separate process reads stderr and
writes JSON: tandem's own lines unchanged, everything else as records that may have several lines. It survives
a crash, so the last lines of a process reach the log. It ends when no process is left that can write to it.
"""

import atexit
import json
import logging
import os
import select
import sys
from collections.abc import Callable
from contextlib import suppress

from tandem.log import LOGGER_NAME, JsonFormatter
from tandem.process import name_process
from tandem.signals import ignore_stop_signals

log = logging.getLogger(LOGGER_NAME)

QUIET_SECONDS = 0.1
"""Lines that follow each other faster than this become one record, such as the frames of one error."""
LONGEST_BYTES = 64 * 1024
"""A record ends at this size; what follows becomes another record."""
DRAIN_SECONDS = 1.0
"""How long a process that ends waits for its last lines to be written."""
WRITER = "tandem-log"
"""The name of the process that writes JSON."""
LEVELS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
"""The letter after the bracket in the C++ logs of torch, as in `[W1125 14:02:07 ...]`."""


def wrap_stderr(node: int) -> None:
    """Turn what this process and its children print to stderr into JSON lines with this `node`.

    Call `drain` before the process ends. A normal interpreter exit calls it.
    """
    # Random, so that no program prints it by chance.
    marker = os.urandom(8).hex().encode()
    sys.stderr.flush()
    try:
        done = _start_writer(node, marker)
    except OSError as error:  # out of processes or file descriptors
        log.warning("stderr of libraries stays plain text: cannot start its JSON writer (%s)", error.strerror)
        return
    _drains[:] = [(os.getpid(), marker, done)]
    atexit.register(drain)


def _start_writer(node: int, marker: bytes) -> int:
    """Start the process that writes JSON; return the descriptor on which it answers a `marker`.

    Raises OSError.
    """
    (theirs, ours), (done, tell) = os.pipe(), os.pipe()
    try:
        starter = os.fork()
    except OSError:
        for descriptor in (theirs, ours, done, tell):
            os.close(descriptor)
        raise
    if starter == 0:
        with suppress(BaseException):
            os.close(ours)
            os.close(done)
            if os.fork() == 0:  # orphaned, so that code that kills this process's children does not kill it
                _become_the_writer(theirs)
                write_on(theirs, 2, node, marker, lambda: os.write(tell, b"."))
        os._exit(0)
    os.close(theirs)
    os.close(tell)
    # It has ended at once and would stay a zombie.
    os.waitpid(starter, 0)
    # The descriptor, because C++ code does not write to sys.stderr.
    os.dup2(ours, 2)
    os.close(ours)
    return done


_drains: list[tuple[int, bytes, int]] = []


def drain() -> None:
    """Wait until everything this process printed is written. Its container may end when it does."""
    while _drains:
        process, marker, done = _drains.pop()
        # A fork inherits the list, but the writer answers the process that made the pipe.
        if process == os.getpid():
            with suppress(OSError, ValueError):
                sys.stderr.flush()
                os.write(2, b"\n%s\n" % marker)
                select.select([done], [], [], DRAIN_SECONDS)


def _become_the_writer(source: int) -> None:
    # A kill of the process group would lose the last lines.
    os.setsid()
    ignore_stop_signals()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        if descriptor != source:
            os.dup2(nothing, descriptor)
    name_process(WRITER)


def write_on(source: int, to: int, node: int, marker: bytes, drained: Callable[[], object]) -> None:
    """Read `source` to its end and write JSON lines to `to`. Call `drained()` at each `marker` line."""
    begun = b""
    plain = list[bytes]()

    def write(text: bytes) -> None:
        with suppress(OSError):  # the reader is gone; programs that print must not notice
            while text:
                # write(2) may take only a part.
                text = text[os.write(to, text) :]

    def flush() -> None:
        if plain:
            write(record(b"\n".join(plain).decode(errors="replace"), node))
            plain.clear()

    while True:
        if plain and not select.select([source], [], [], QUIET_SECONDS)[0]:
            flush()
        chunk = os.read(source, LONGEST_BYTES)
        *lines, begun = (begun + chunk).split(b"\n")
        # A JSON line that is cut is not JSON any more.
        longest = LONGEST_BYTES * (16 if begun.startswith(b"{") else 1)
        if begun and (not chunk or len(begun) > longest):
            lines, begun = [*lines, begun], b""
        for line in lines:
            if line == marker:
                flush()
                drained()
            elif is_record(line):
                flush()
                write(line + b"\n")
            elif text := line.rstrip().rpartition(b"\r")[2]:  # the latest state of a progress bar
                plain.append(text)
        if sum(map(len, plain)) > LONGEST_BYTES:
            flush()
        if not chunk:
            flush()
            return


def is_record(line: bytes) -> bool:
    if not line.startswith(b"{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def record(text: str, node: int) -> bytes:
    """Return printed text as one JSON line.

    `message` is the first line; `output` has all lines, if there are several.
    """
    first, *more = text.split("\n")
    is_native = first.startswith("[") and first[2:6].isdigit()
    level = LEVELS.get(first[1:2], "WARNING") if is_native else "WARNING"
    fields = {"levelname": level, "msg": first, **({"output": text} if more else {})}
    return JsonFormatter(None, node).format(logging.makeLogRecord(fields)).encode() + b"\n"
