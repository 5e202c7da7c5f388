"""Numbered records in a run directory, each created by exactly one writer: the lease records of its owner.

owner/000000007            in a directory: a file that appears with its full contents
owner/000000007/note.json  on an object store: created only if there is none (conditional put)
"""

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Protocol

from tandem.bounded_reader import opened
from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import retry_stale
from tandem.config.address import RemotePath
from tandem.paths import is_directory

LARGEST_BYTES = 64 * 1024
NAME = re.compile(r"\d{9,}")


class LeaseRecords(Protocol):
    """Records by number. All methods raise OSError."""

    def numbers(self) -> list[int]:
        """Return the numbers of the existing records."""

    def read(self, number: int) -> bytes | None:
        """Return the record; None if it does not exist."""

    def create(self, number: int, content: bytes) -> bool:
        """Create a record unless it exists; return True if the existing record is now this one."""

    def rewrite(self, number: int, content: bytes) -> None:
        """Overwrite an existing record with content of the same length. Raises FileNotFoundError."""

    def remove(self, number: int) -> None:
        """Remove a record if it exists."""


def lease_records_at(where: PurePath) -> LeaseRecords:
    """Return the records stored in `where`."""
    return RemoteLeaseRecords(where) if isinstance(where, RemotePath) else FolderLeaseRecords(Path(where))


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if NAME.fullmatch(name))


class FolderLeaseRecords:
    """Records in a directory on this machine, or on a volume that is mounted here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:09d}"

    def numbers(self) -> list[int]:
        return retry_stale(lambda: _numbers(os.listdir(self._folder) if is_directory(self._folder) else []))

    def read(self, number: int) -> bytes | None:
        def once() -> bytes:
            path = self._path(number)
            with opened(path.parent.parent, f"{path.parent.name}/{path.name}") as file:
                return file.read(LARGEST_BYTES)

        with suppress(FileNotFoundError):
            return retry_stale(once)
        return None

    def create(self, number: int, content: bytes) -> bool:
        # NFS may report a link that succeeded as one that existed.
        return create_whole(self._path(number), content) or self.read(number) == content

    def rewrite(self, number: int, content: bytes) -> None:
        descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            # The length stays the same and the file is not truncated, so no reader sees a short record.
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        # After the first record, also remove the directories created for it, if they are empty.
        if number == 1:
            for folder in (self._folder, self._folder.parent):
                with suppress(OSError):
                    folder.rmdir()


def create_whole(path: Path, content: bytes) -> bool:
    """Create a file that readers see with all of its content or not at all, unless it exists.

    It is a hard link to a finished file. Returns False if the path exists. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_name(f".tmp-{path.name}-{secrets.token_hex(8)}")
    try:
        _write_new(whole, content)
        try:
            os.link(whole, path)
        except FileExistsError:
            return False
        except OSError:  # no hard links here; file systems report that with different errors
            return _create_exclusively(path, content)
        return True
    finally:
        whole.unlink(missing_ok=True)


def _create_exclusively(path: Path, content: bytes) -> bool:
    try:
        # A reader may see a part of this file, which a hard link prevents elsewhere.
        _write_new(path, content)
    except FileExistsError:
        return False
    return True


def _write_new(path: Path, content: bytes) -> None:
    with path.open("xb") as file:
        file.write(content)


class RemoteLeaseRecords:
    """Records on an object store, given by its address."""

    def __init__(self, where: RemotePath) -> None:
        self._where = where
        self._store = remote_at(where)

    def _path(self, number: int) -> PurePath:
        return self._where / f"{number:09d}" / "note.json"

    def numbers(self) -> list[int]:
        return _numbers(self._store.list(self._where))

    def read(self, number: int) -> bytes | None:
        return self._store.read(self._path(number))

    def create(self, number: int, content: bytes) -> bool:
        return self._store.create(self._path(number), content)

    def rewrite(self, number: int, content: bytes) -> None:
        self._store.write(self._path(number), content)

    def remove(self, number: int) -> None:
        self._store.delete(self._path(number).parent, ["note.json"])
