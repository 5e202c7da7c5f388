"""Numbered notes beside a run, each made by one writer only: what a run's owner writes itself down with.

owner/000000007            in a folder: a file that appears with all its bytes
owner/000000007/note.json  on an object store: put on condition that there is none
"""

import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath
from typing import Protocol

from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import unstale
from tandem.config.address import RemotePath
from tandem.paths import is_directory
from tandem.reading import opened

LARGEST_BYTES = 64 * 1024
NAME = re.compile(r"\d{9,}")


class Notes(Protocol):
    """Notes by number. All methods raise OSError."""

    def numbers(self) -> list[int]:
        """Those that are there."""

    def read(self, number: int) -> bytes | None:
        """The note; None where there is none."""

    def create(self, number: int, content: bytes) -> bool:
        """Write a note where there is none; whether it is this one that is there now."""

    def rewrite(self, number: int, content: bytes) -> None:
        """Other content of the same length, for a note that is there. Raises FileNotFoundError."""

    def remove(self, number: int) -> None:
        """As far as it is there."""


def notes_at(where: PurePath) -> Notes:
    """The notes that lie in `where`."""
    return RemoteNotes(where) if isinstance(where, RemotePath) else FolderNotes(Path(where))


def _numbers(names: Iterable[str]) -> list[int]:
    return sorted(int(name) for name in names if NAME.fullmatch(name))


class FolderNotes:
    """In a folder on this machine, or on a volume that is mounted here."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:09d}"

    def numbers(self) -> list[int]:
        return unstale(lambda: _numbers(os.listdir(self._folder) if is_directory(self._folder) else []))

    def read(self, number: int) -> bytes | None:
        def once() -> bytes:
            path = self._path(number)
            with opened(path.parent.parent, f"{path.parent.name}/{path.name}") as file:
                return file.read(LARGEST_BYTES)

        with suppress(FileNotFoundError):
            return unstale(once)
        return None

    def create(self, number: int, content: bytes) -> bool:
        """A second name for a file that is written already: whoever sees the note sees all of it."""
        self._folder.mkdir(parents=True, exist_ok=True)
        target = self._path(number)
        whole = self._folder / f".tmp-{target.name}-{secrets.token_hex(8)}"
        try:
            _write_new(whole, content)
            try:
                os.link(whole, target)
            except FileExistsError:
                return self.read(number) == content  # NFS may say so of a link that has worked
            except OSError:  # no hard links here, for which file systems have many numbers
                return self._create_exclusively(target, content)
            return True
        finally:
            whole.unlink(missing_ok=True)

    def _create_exclusively(self, target: Path, content: bytes) -> bool:
        try:
            _write_new(target, content)
        except FileExistsError:
            return False
        return True

    def rewrite(self, number: int, content: bytes) -> None:
        descriptor = os.open(self._path(number), os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(descriptor, content, 0)
        finally:
            os.close(descriptor)

    def remove(self, number: int) -> None:
        self._path(number).unlink(missing_ok=True)
        if number == 1:  # with the first, what was made for it, if nothing else is there
            for folder in (self._folder, self._folder.parent):
                with suppress(OSError):
                    folder.rmdir()


def _write_new(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        os.write(descriptor, content)
    finally:
        os.close(descriptor)


class RemoteNotes:
    """On a store that an address names."""

    def __init__(self, where: RemotePath) -> None:
        self._where, self._store = where, remote_at(where)

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
