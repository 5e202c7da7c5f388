"""Files that are appended to for as long as a run lasts: a bounded one, and beside it the one before, NAME.1.

A full file is renamed, never cut: what another process has open goes on into the renamed one, and a reader
finds each line in one of the two. Two that rename at once are kept apart by a lock (flock) that nobody waits
for long: a process may be frozen while it holds it. On a volume without such locks files are not rotated.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tandem.layout import OLDER
from tandem.reading import opened

LOG_BYTES = 32 * 2**20
"""A file of log/ is full; with the one before it a rank's output takes twice that at most, or little more."""
EVENTS_BYTES = 2 * 2**20
"""events.jsonl is full. Less than `reading.TAIL_BYTES`, so that readers see all of both files."""
TRIES, PAUSE_SECONDS = 200, 0.005
"""Looks whether a rename is over: it takes milliseconds, or tenths of a second where events are counted."""


def older(path: Path) -> Path:
    """The file before this one."""
    return path.with_name(path.name + OLDER)


def is_at(path: Path, descriptor: int) -> bool:
    """Whether `path` is still the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def put_aside(path: Path, limit: int) -> None:
    """Before it is opened: rename it where it is full and nobody else is at it."""
    with suppress(OSError), exclusively(path, limit):
        path.replace(older(path))


def replace_full(path: Path, fresh: Path) -> None:
    """`path` becomes the older file, and `fresh` stands in its place at once: whoever comes between would
    begin one that is overwritten. Raises OSError."""
    spare = path.with_name(f".{path.name}.old")
    try:
        spare.unlink(missing_ok=True)
        os.link(path, spare)
        spare.replace(older(path))
        spare.unlink(missing_ok=True)  # it stays where both were the same file, as a kill leaves them
    except OSError:  # a volume without hard links
        path.replace(older(path))
    fresh.replace(path)


def has_gone(path: Path, descriptor: int, limit: int) -> bool:
    """Rename the file that is open where it is full; whether `path` is now another file, or none."""
    if is_at(path, descriptor):
        with suppress(OSError):
            if os.fstat(descriptor).st_size >= limit:
                put_aside(path, limit)
    return not is_at(path, descriptor)


@contextmanager
def exclusively(path: Path, limit: int) -> Iterator[BinaryIO]:
    """The full file that nobody else renames meanwhile. Raises OSError where it is not full, or not to be
    had now. The lock is of an opening of its own, since a process shares those that it was started with."""
    with path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if not is_at(path, file.fileno()) or os.fstat(file.fileno()).st_size < limit:
                raise FileNotFoundError(f"{path} is no longer full")
            yield file
        finally:  # a process that was forked meanwhile has the file open, too
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """Open `path` to append to it, while nobody renames it. Raises OSError.

    Where whoever renames it does not come to an end, what is written goes into the renamed file.
    """
    for attempt in range(TRIES):
        with path.open("a+b", buffering=0) as file:
            if (_is_shared(file) and is_at(path, file.fileno())) or attempt == TRIES - 1:
                try:
                    yield file
                finally:
                    with suppress(OSError):
                        fcntl.flock(file, fcntl.LOCK_UN)
                return
        time.sleep(PAUSE_SECONDS)


def _is_shared(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a volume without such locks
    return True


def tail(path: Path, count: int) -> tuple[bytes, bool]:
    """The last `count` bytes of what was written to `path`, and whether there are more before them.

    They begin in the older file where `path` is shorter. Neither it nor its folder may be a link. Raises
    OSError, also where neither is there.
    """
    for _ in range(TRIES):
        with ExitStack() as stack:
            files = []
            for each in (path, older(path)):  # the other way round, a rename between them would hide one
                with suppress(FileNotFoundError):
                    place = Path(each.parent.name, each.name)
                    files.append(stack.enter_context(opened(each.parent.parent, str(place))))
            if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
                continue  # renamed between the two
            if not files:
                raise FileNotFoundError(f"{path} does not exist")
            found, is_cut = b"", False
            for file in files:
                size, left = file.seek(0, os.SEEK_END), count - len(found)
                file.seek(max(0, size - left))
                found = file.read(left) + found
                is_cut = is_cut or size > left
            return found, is_cut
    raise FileNotFoundError(f"{path} is being renamed repeatedly")


class Output:
    """`descriptors` of this process that are open to append to `path`, and go on in a new file when it is
    full; native code and threads that write meanwhile lose nothing.

    Processes started before go on in the older file, and what they write is gone with that one.
    """

    def __init__(self, path: Path, *descriptors: int) -> None:
        self._path, self._descriptors, self._process = path, descriptors, os.getpid()
        self._stat = os.fstat(descriptors[0])

    def renew(self) -> None:
        """Look, and do so. Descriptors that the program has since turned to something else are left alone."""
        ours = [each for each in self._descriptors if self._is_ours(each)]
        if os.getpid() != self._process or not ours or not has_gone(self._path, ours[0], LOG_BYTES):
            return
        with suppress(OSError):  # no space, say: it goes on in the older one, and is tried again
            new = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            for each in ours:
                os.dup2(new, each, os.get_inheritable(each))
            self._stat = os.fstat(new)
            os.close(new)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._stat)
        except OSError:
            return False
