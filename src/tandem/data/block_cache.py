"""The folder in which the ranks of a node keep blocks from object stores, up to a number of bytes.

Many processes use it at once, and each may be killed at any moment. A block is written under another name
and then renamed, so a file with its final name is complete. All locks belong to open files (F_OFD_SETLK), so
the kernel releases them when a process ends:

- Each block has a lock. Its owner requests the block, so that no other process of the node does.
- A process holds a shared lock on each block that its rank reads next. Such a block is not evicted.
- One lock protects the number of bytes in the folder, which is stored in the file with the locks. It is
  increased before a file is created and decreased after one was removed, so it is never too low.
"""

import fcntl
import hashlib
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from tandem.data.tar_index import StoredBlock
from tandem.errors import ConfigError
from tandem.process import nearest_existing

LOCKS = "locks"
PART = ".part"
"""Suffix of a block's file while it is being written."""
PAGE = 4096
"""File systems store whole pages."""
ACCOUNT = 0
"""The byte whose lock protects the number of bytes in the folder."""
WRITING = 2**60
READING = 2**61
"""Offsets at which the locks of written and of read blocks begin; a lock needs no existing byte."""
_LOCK = struct.Struct("hhqqi4x")
_TOTAL = struct.Struct("20s")
_LIMIT = struct.Struct("20s")
"""After the total: the limit of the process that last opened the folder, for people who look at it."""
SPARE = 16
"""An eviction lists the folder, so it frees 1/SPARE of the limit at once."""


class _Entry(NamedTuple):
    used: float
    """Time of the last use."""
    size: int
    name: str


class BlockCache:
    """The blocks in `folder`, which take at most `limit` bytes. Thread-safe.

    Raises ConfigError if the folder cannot be used.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise ConfigError(f"the block cache {folder} belongs to another user; use another cache_dir")
            # These are separate open files, because an open file never conflicts with its own locks.
            self._account = self._opened()
            self._readings = self._opened()
        except OSError as error:
            raise ConfigError(
                f"cannot use the block cache {folder}: {error.strerror or error}; use another cache_dir"
            ) from error
        self._thread_lock = threading.Lock()
        with self._accounting():
            self._evict(0, urgent=True)
            os.pwrite(self._account, f"{limit:>{_LIMIT.size}}".encode(), _TOTAL.size)

    def _opened(self) -> int:
        return os.open(self.folder / LOCKS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def path(self, block: StoredBlock) -> Path:
        """Return the file of a block, whether it exists or not."""
        return self.folder / name_of(block)

    def used(self) -> int:
        """Return the bytes in the folder, or slightly more."""
        return self._total() or 0

    @contextmanager
    def writing(self, block: StoredBlock) -> Iterator[None]:
        """Hold the lock of a block; first wait until no other process or thread has it."""
        descriptor = self._opened()
        try:
            _lock(descriptor, fcntl.F_WRLCK, WRITING + _place(name_of(block)), wait=True)
            yield
        finally:
            os.close(descriptor)

    def keep(self, block: StoredBlock) -> None:
        """Protect a block from eviction until `release`, whether it exists yet or not."""
        _lock(self._readings, fcntl.F_RDLCK, READING + _place(name_of(block)))
        # Update the time of last use: it shows other processes the order in which blocks are needed.
        with suppress(OSError):
            os.utime(self.path(block))

    def release(self, block: StoredBlock) -> None:
        """End the protection of `keep`."""
        _lock(self._readings, fcntl.F_UNLCK, READING + _place(name_of(block)))

    def reserve(self, block: StoredBlock, urgent: bool) -> Path | None:
        """Make room for a block, and return the file to write it to; None if there is no room now.

        The caller holds the lock of the block. Blocks that are read next are removed only if it is `urgent`.
        Raises ConfigError if the volume is full.
        """
        part = self.path(block).with_suffix(PART)
        size = _stored(block.length)
        with self._accounting():
            self._remove(part)  # left by a killed process
            if not self._fits(size) and not self._evict(size, urgent):
                return None
            self._set_total(self.used() + size)
            try:
                self._allocate(part, block.length)
            except OSError as error:
                self._remove(part, at_least=size)
                raise ConfigError(
                    f"cannot store a block in {self.folder}: {error.strerror or error}; use another "
                    "cache_dir or fewer cache_bytes"
                ) from error
        return part

    def commit(self, part: Path, block: StoredBlock) -> None:
        """Give a complete block its final name."""
        # Without the lock, another process that lists the folder could miss a file while it is renamed.
        with self._accounting():
            os.rename(part, self.path(block))

    def discard(self, path: Path) -> None:
        """Remove a file of the folder."""
        with self._accounting():
            self._remove(path)

    def _allocate(self, part: Path, length: int) -> None:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            # If the file grew later, its bytes would not count until then, and the volume might be full.
            os.posix_fallocate(descriptor, 0, length)
        finally:
            os.close(descriptor)

    @contextmanager
    def _accounting(self) -> Iterator[None]:
        # The lock of an open file is the same for all threads of the process.
        with self._thread_lock:
            _lock(self._account, fcntl.F_WRLCK, ACCOUNT, wait=True)
            try:
                yield
            finally:
                _lock(self._account, fcntl.F_UNLCK, ACCOUNT)

    def _total(self) -> int | None:
        return _number(os.pread(self._account, _TOTAL.size, 0))

    def _set_total(self, total: int) -> None:
        os.pwrite(self._account, f"{max(0, total):>{_TOTAL.size}}".encode(), 0)

    def _fits(self, size: int) -> bool:
        total = self._total()
        return total is not None and total + size <= self.limit

    def _remove(self, path: Path, at_least: int = 0) -> int:
        """Remove a file and return its size; `at_least`: the size that was counted for it."""
        try:
            size = max(_stored(path.stat().st_size), at_least)
            path.unlink()
        except FileNotFoundError:
            size = at_least
        if size:
            self._set_total(self.used() - size)
        return size

    def _evict(self, size: int, urgent: bool) -> bool:
        """Count the folder, make room for `size` bytes if necessary, and return whether there is room."""
        blocks, total = self._listed()
        self._set_total(total)
        if total + size <= self.limit:
            return True
        free = self.limit - self.limit // SPARE - size
        needed: list[_Entry] = []
        for entry in blocks:
            if total <= free:
                break
            if self._is_kept(entry.name):
                needed.append(entry)
            else:
                total -= self._remove(self.folder / entry.name)
        # A rank waits for this block, and all other ranks wait for that rank.
        for entry in needed if urgent else ():
            if total + size <= self.limit:
                break
            total -= self._remove(self.folder / entry.name)
        return total + size <= self.limit

    def _listed(self) -> tuple[list[_Entry], int]:
        """Return the blocks, least recently used first, and the bytes of all files; remove leftovers."""
        blocks = []
        total = 0
        for entry in os.scandir(self.folder):
            if entry.name == LOCKS:
                continue
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # deleted by hand
                continue
            if entry.name.endswith(PART) and self._is_left_over(entry.name.removesuffix(PART)):
                os.unlink(entry.path)
                continue
            total += _stored(found.st_size)
            if not entry.name.endswith(PART):
                blocks.append(_Entry(found.st_mtime, _stored(found.st_size), entry.name))
        return sorted(blocks), total

    def _is_left_over(self, name: str) -> bool:
        return not self._is_locked(WRITING + _place(name))

    def _is_kept(self, name: str) -> bool:
        return self._is_locked(READING + _place(name))

    def _is_locked(self, start: int) -> bool:
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, 1, 0)
        answer: bytes = fcntl.fcntl(self._account, fcntl.F_OFD_GETLK, asked)
        return bool(_LOCK.unpack(answer)[0] != fcntl.F_UNLCK)


class CacheContents(NamedTuple):
    """The contents of a cache: blocks, their bytes on disk, and its limit if a process has recorded one."""

    blocks: int
    size: int
    limit: int | None


def contents(folder: Path) -> CacheContents:
    """Return the contents of the cache in a folder, unchanged. Raises OSError if it is not readable."""
    sizes = []
    for entry in os.scandir(folder):
        if entry.name != LOCKS:
            with suppress(FileNotFoundError):  # evicted since it was listed
                sizes.append(_stored(entry.stat(follow_symlinks=False).st_size))
    locks = folder / LOCKS
    limit = locks.read_bytes()[_TOTAL.size : _TOTAL.size + _LIMIT.size] if locks.exists() else b""
    return CacheContents(len(sizes), sum(sizes), _number(limit))


def most_bytes(folder: Path, wanted: int) -> int:
    """Return `wanted`, or three quarters of what the volume of `folder` has for its blocks, if that is less.

    Another process may have filled the cache, so its blocks count as free. `BlockCache` reports a folder that
    cannot be used.
    """
    try:
        free = shutil.disk_usage(nearest_existing(folder)).free
        with suppress(OSError):
            free += _number((folder / LOCKS).read_bytes()[: _TOTAL.size]) or 0
    except OSError:
        return wanted
    return min(wanted, free * 3 // 4)


def _number(text: bytes) -> int | None:
    return int(text) if text.strip().isdigit() else None


def _lock(descriptor: int, kind: int, start: int, wait: bool = False) -> None:
    """Lock or unlock one byte. Raises OSError if another open file has it, unless `wait` is set."""
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    fcntl.fcntl(descriptor, command, _LOCK.pack(kind, os.SEEK_SET, start, 1, 0))


def name_of(block: StoredBlock) -> str:
    """Return the name of a block's file, which changes with the contents."""
    text = f"{block.address} {block.offset} {block.length} {block.crc32}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:40]


def _place(name: str) -> int:
    try:
        return int(name[:14], 16)
    except ValueError:  # a file of another program
        return 0


def _stored(size: int) -> int:
    return -(-size // PAGE) * PAGE
