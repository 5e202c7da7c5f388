"""What a rank's threads stand in, written when its agent asks, without a signal that its program may use.

A rank that runs no Python any more (one in C that keeps the interpreter's lock) is asked by a signal, which
a handler in C hears. It is sent to no other: where a program has taken even that one for a handler of its
own, in Python, it does not run in such a rank.
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
"""Nothing else is known to use it: glibc takes the first two of these signals."""
_file: IO[str] | None = None


def stacks_file(directory: Path, rank: int) -> Path:
    return directory / layout.stacks(rank)


def keep_stacks(directory: Path, rank: int) -> None:
    """Open the file that this rank's stacks go to: when they are asked for, its volume may hang."""
    global _file
    path = stacks_file(directory, rank)
    try:
        put_aside(path, LOG_BYTES)
        _file = path.open("a")
    except OSError as error:  # a worker needs no volume
        log.debug("no stacks will be written: %s", error)
        return
    faulthandler.register(LAST_RESORT, file=_file, all_threads=True)


def write_stacks() -> None:
    if _file is not None:
        faulthandler.dump_traceback(file=_file, all_threads=True)
