"""The interface between the checkpoint store and its storage, and the file formats. No torch here.

An entry is a directory with the files of one checkpoint; its MANIFEST marks it as complete.
"""

import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Protocol, TypeVar

STATE = "state.pt"
MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(\d{9,})")
STALE_TRIES = 3
T = TypeVar("T")


class Sink:
    """The file object that a payload is written to (by torch.save); hashes and counts the bytes."""

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write = write
        self._digest = hashlib.sha256()
        self.bytes = 0
        self._error: OSError | None = None  # torch.save converts it to a RuntimeError

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        written = 0
        try:
            while written < len(view):
                written += self._write(view[written:])
        except OSError as error:
            self._error = error
            raise
        self.bytes += written
        return written

    def flush(self) -> None:
        """Do nothing; nothing is buffered here."""

    def take(self, payload: "Payload") -> None:
        """Write all of `payload`. Raises OSError if the storage fails, and whatever the payload raises."""
        try:
            payload(self) if callable(payload) else self.write(payload)
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise

    def entry(self) -> dict[str, object]:
        """Return the manifest's entry for this file."""
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


Payload = bytes | memoryview | Callable[[Sink], object]
Entries = dict[str, dict[str, object]]
"""{file name: its `Sink.entry`}"""


def retry_stale(action: Callable[[], T]) -> T:
    """Return `action()`; retry if NFS reports ESTALE, because a new lookup gets fresh handles."""
    for _ in range(STALE_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return action()


class StorageReader(Protocol):
    """An open file; `size` is its size in bytes when it was opened."""

    @property
    def size(self) -> int: ...
    def read(self, size: int = -1, /) -> bytes: ...
    def seek(self, offset: int, /) -> object: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """Where checkpoints are stored. All methods raise OSError; FileNotFoundError if a file does not exist.

    `is_atomic`: an entry gets its name together with all its files, so an entry without a manifest is
    damaged.
    """

    @property
    def is_atomic(self) -> bool: ...

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        """Return {entry: {file: bytes}} of `directory`, empty if it does not exist.

        If a writer adds an entry and then removes another one, the result contains at least one of them.
        """

    def open(self, path: PurePath, from_disk: bool = False) -> StorageReader:
        """Open a file for reading; `from_disk`: bypass the page cache if possible.

        Raises OSError with EBADMSG, as for damage, if it exists but is not a regular file (a pipe, device,
        link or directory).
        """

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        """Write an entry, manifest last; once this returns, it is complete and durable. Returns its bytes.

        If the writer is killed or fails earlier, the entry does not exist. Raises FileExistsError if it
        already exists, unless `replace` is set.
        """

    def begin(self, target: PurePath, replace: bool) -> PurePath:
        """Return where several processes may `add` the files of the entry `target`.

        Raises FileExistsError as `commit`.
        """

    def add(self, pending: PurePath, name: str, payload: Payload) -> tuple[str, dict[str, object]]:
        """Write one file; once this returns, it is durable. Returns (its final name, its `Sink.entry`)."""

    def publish(
        self,
        pending: PurePath,
        target: PurePath,
        files: Entries,
        manifest: Callable[[Entries], bytes],
        replace: bool,
    ) -> int:
        """Complete an entry with the `files` that were added. Returns and raises as `commit`."""

    def abandon(self, pending: PurePath) -> None:
        """Remove the files that were added to `pending`, as far as possible. Raises nothing."""

    def repair(self, directory: PurePath) -> None:
        """Finish or undo the incomplete work of a killed writer in `directory`."""

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Rename a directory to an unused name."""

    def remove(self, entries: Sequence[PurePath]) -> None:
        """Remove entries so that no reader ever sees one partly removed but with a manifest."""


class Remote(Storage, Protocol):
    """A storage given by an address. The run's own small files are also copied to it (`run/directory.py`)."""

    def read(self, path: PurePath) -> bytes | None:
        """Return the contents of a small file; None if it does not exist."""

    def write(self, path: PurePath, data: bytes) -> None:
        """Write a small file, replacing an existing one; missing directories are created.

        A concurrent reader gets either the old or the new contents: an owner rewrites its lease record every
        few seconds, and other launches read it.
        """

    def create(self, path: PurePath, data: bytes) -> bool:
        """Create a file unless it exists; return True if it now has these (unique) contents."""

    def delete(self, directory: PurePath, names: Iterable[str]) -> None:
        """Delete these files in `directory`, in this order; missing ones are skipped."""
