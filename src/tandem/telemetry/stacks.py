"""Stacks of a rank's threads, written when its agent asks, without a signal that its program may use.

A rank that no longer runs Python (C code that holds the interpreter's lock) is asked by a signal, which a C
handler receives. No other rank gets this signal: a program may have replaced the handler with one in Python,
which does not run in such a rank either.
"""

import faulthandler
import logging
import signal
from pathlib import Path
from typing import IO

from tandem import layout
from tandem.rotation import LOG_BYTES, put_aside

log = logging.getLogger("tandem.run")

LAST_RESORT = signal.SIGRTMAX - 7
"""Not known to be used by anything else; glibc reserves the first two real-time signals."""
_file: IO[str] | None = None


def stacks_file(directory: Path, rank: int) -> Path:
    return directory / layout.stacks(rank)


def keep_stacks(directory: Path, rank: int) -> None:
    """Open the file for this rank's stacks in advance, because its volume may hang when they are needed."""
    global _file
    path = stacks_file(directory, rank)
    try:
        put_aside(path, LOG_BYTES)
        _file = path.open("a")
    except OSError as error:  # training does not depend on it
        log.debug("no stacks will be written: %s", error)
        return
    faulthandler.register(LAST_RESORT, file=_file, all_threads=True)


def write_stacks() -> None:
    if _file is not None:
        faulthandler.dump_traceback(file=_file, all_threads=True)
