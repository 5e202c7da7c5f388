"""Per-agent temp directory for sockets; removed on exit, stale ones cleaned up by later agents."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import ConfigError

SOCKET_BYTES = 107  # unix(7): 108 with the terminating zero
LONGEST_NAME = len("/listener-12345678")  # the name that multiprocessing gives its socket
ELSEWHERE = ("/tmp", "/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary directory of this process, and remove it at the end.

    Its path is short enough for the name of a socket in it. Its name has the process ID and the PID namespace
    in which the ID counts, because containers may share a temporary directory. Directories of processes that
    are gone are removed before and after, because a launch may have killed a simulated node. Raises
    ConfigError if no directory can be created.
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
    """Return where such a directory may be: the temporary directory, or others if its path is too long."""
    try:
        wanted = [tempfile.gettempdir(), *ELSEWHERE]
    except OSError:  # no candidate is writable
        wanted = [*ELSEWHERE]
    return [
        Path(each) for each in wanted if len(os.fsencode(f"{each}/{name}")) + LONGEST_NAME <= SOCKET_BYTES
    ]


def _sweep(parent: Path, prefix: str) -> None:
    for old in parent.glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's cannot be removed


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
