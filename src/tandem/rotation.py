"""Bound files that are appended to during a run: NAME, and the previous one, NAME.1.

A full file is renamed, never truncated: a process that has it open keeps writing to the renamed file, and a
reader finds each line in one of the two. A lock (flock) prevents two renames at once. Nothing waits long for
it, because a process may be frozen while it holds it. On a volume without such locks, files are not rotated.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tandem.bounded_reader import opened
from tandem.layout import OLDER

LOG_BYTES = 32 * 2**20
"""The size at which a file of log/ is full.

With the previous file, a rank's output takes about twice that.
"""
EVENTS_BYTES = 2 * 2**20
"""The size at which events.jsonl is full. Less than `reading.TAIL_BYTES`, so readers see both files whole."""
TRIES = 200
PAUSE_SECONDS = 0.005
"""How often to check whether a rename is over. It takes milliseconds, or tenths of a second for events."""


def older(path: Path) -> Path:
    return path.with_name(path.name + OLDER)


def is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether `path` is still the file that is open as `descriptor`."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False


def rotate(path: Path, limit: int) -> None:
    """Rename a file, before it is opened, if it is full and no other process renames it."""
    with suppress(OSError), exclusively(path, limit):
        path.replace(older(path))


def replace_full(path: Path, fresh: Path) -> None:
    """Make `path` the older file and put `fresh` in its place, without a moment at which `path` is missing.

    Another process would otherwise create a file there, which `fresh` would overwrite. Raises OSError.
    """
    spare = path.with_name(f".{path.name}.old")
    try:
        spare.unlink(missing_ok=True)
        os.link(path, spare)
        spare.replace(older(path))
        spare.unlink(missing_ok=True)  # still there if both names were one file, as a kill leaves them
    except OSError:  # a volume without hard links
        path.replace(older(path))
    fresh.replace(path)


def rotate_if_full(path: Path, descriptor: int, limit: int) -> bool:
    """Rename the open file if it is full; return whether `path` is now another file, or missing."""
    if is_same_file(path, descriptor):
        with suppress(OSError):
            if os.fstat(descriptor).st_size >= limit:
                rotate(path, limit)
    return not is_same_file(path, descriptor)


@contextmanager
def exclusively(path: Path, limit: int) -> Iterator[BinaryIO]:
    """Open the full file while no other process renames it.

    Raises OSError if it is not full, or locked. Opens the file again for the lock, because a process shares
    the locks of descriptors that it inherited.
    """
    with path.open("r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            if not is_same_file(path, file.fileno()) or os.fstat(file.fileno()).st_size < limit:
                raise FileNotFoundError(f"{path} is no longer full")
            yield file
        finally:  # a process that was forked meanwhile has the file open, too
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def appending(path: Path) -> Iterator[BinaryIO]:
    """Open `path` for appending while no other process renames it. Raises OSError.

    If a rename does not finish in time, the data goes into the renamed file.
    """
    for attempt in range(TRIES):
        with path.open("a+b", buffering=0) as file:
            if (_is_shared(file) and is_same_file(path, file.fileno())) or attempt == TRIES - 1:
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
    """Return the last `count` bytes of what was written to `path`, and whether there are more before them.

    The older file supplies what `path` lacks. Neither the file nor its directory may be a link. Raises
    OSError, also if both are missing.
    """
    for _ in range(TRIES):
        with ExitStack() as stack:
            files = []
            for each in (path, older(path)):  # in the other order, a rename in between would hide one of them
                with suppress(FileNotFoundError):
                    relative = Path(each.parent.name, each.name)
                    files.append(stack.enter_context(opened(each.parent.parent, str(relative))))
            if len(files) == 2 and os.path.sameopenfile(files[0].fileno(), files[1].fileno()):
                continue  # renamed between the two
            if not files:
                raise FileNotFoundError(f"{path} does not exist")
            found = b""
            is_cut = False
            for file in files:
                size = file.seek(0, os.SEEK_END)
                left = count - len(found)
                file.seek(max(0, size - left))
                found = file.read(left) + found
                is_cut = is_cut or size > left
            return found, is_cut
    raise FileNotFoundError(f"{path} is being renamed repeatedly")


class Output:
    """Descriptors of this process that append to `path`, and that switch to a new file when it is full.

    No output of native code or other threads is lost during the switch. Processes that were started earlier
    keep writing to the older file, until the next rotation deletes it.
    """

    def __init__(self, path: Path, *descriptors: int) -> None:
        self._path = path
        self._descriptors = descriptors
        self._process = os.getpid()
        self._stat = os.fstat(descriptors[0])

    def renew(self) -> None:
        """Move on to a new file if the current one is full.

        Descriptors that the program has since redirected are left alone.
        """
        ours = [each for each in self._descriptors if self._is_ours(each)]
        if os.getpid() != self._process or not ours or not rotate_if_full(self._path, ours[0], LOG_BYTES):
            return
        with suppress(OSError):  # no space, for example: keep the older one, and try again later
            new = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644
            )
            for each in ours:
                # dup2() makes a descriptor inheritable unless it is asked not to.
                os.dup2(new, each, os.get_inheritable(each))
            self._stat = os.fstat(new)
            os.close(new)

    def _is_ours(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._stat)
        except OSError:
            return False
