"""All processes that a program has started which a test has started, wherever they are, also after its end.

Ranks lead sessions of their own, and daemons have no parent: what they have in common is a variable.
"""

import itertools
import os
from collections.abc import Mapping
from pathlib import Path

MARK = "STARTED_BY_TEST"
_numbers = itertools.count()
_marks: dict[int, str] = {}


def marked(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a program whose processes are to be known."""
    return {**environ, MARK: f"{os.getpid()}-{next(_numbers)}"}


def remember(pid: int, environ: Mapping[str, str]) -> None:
    _marks[pid] = environ[MARK]


def living(mark: str) -> dict[int, str]:
    """{pid: name} of the processes with this mark that have not ended."""
    found, line = {}, f"{MARK}={mark}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if line in (entry / "environ").read_bytes().split(b"\0"):
                if (entry / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX":
                    found[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue
    return found


def of_launch(pid: int) -> dict[int, str]:
    """The same for a program that a test has started by `Processes.start`, itself as well."""
    return living(_marks[pid])
