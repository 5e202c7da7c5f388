"""Per-agent temp directory for sockets; removed on exit, stale ones cleaned up by later agents."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import ConfigError

SOCKET_BYTES = 107  # unix(7): 108 with the zero at the end
LONGEST_NAME = len("/listener-12345678")  # as multiprocessing calls its socket
ELSEWHERE = ("/tmp", "/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder of this process, removed at the end; short enough for the name of a socket in it.

    Its name says whose it is: the process, and the PID namespace that this number counts in, because
    containers may share a temporary directory. Those of processes that are no more are swept before and
    after: a launch may have killed a node that it simulates. Raises ConfigError where there is no place.
    """
    prefix = f"tandem-{os.stat('/proc/self/ns/pid').st_ino}-"
    parents = _parents(f"{prefix}{os.getpid()}-12345678")
    for parent in parents:
        _sweep(parent, prefix)
    folder = _make(parents, f"{prefix}{os.getpid()}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            _sweep(parent, prefix)


def _parents(name: str) -> list[Path]:
    """Where such a folder may be: the temporary directory, others where its path is too long."""
    try:
        wanted = [tempfile.gettempdir(), *ELSEWHERE]
    except OSError:  # none can be written to
        wanted = [*ELSEWHERE]
    return [
        Path(each) for each in wanted if len(os.fsencode(f"{each}/{name}")) + LONGEST_NAME <= SOCKET_BYTES
    ]


def _sweep(parent: Path, prefix: str) -> None:
    for old in parent.glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's stays


def _make(parents: list[Path], prefix: str) -> Path:
    problem: OSError | None = None
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            problem = problem or error
    raise ConfigError(
        f"cannot create a temporary directory in {' or '.join(map(str, parents))}: "
        f"{problem.strerror if problem else 'no such directory'}; set TMPDIR to a writable directory"
    )
