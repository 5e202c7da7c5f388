"""Checkpoints in a local folder or on a mounted volume: whole and on disk under their name, or not at all.

step-000000500/            an entry, renamed in with all its files
.tmp-...                   being written or removed, or left by a killed writer; never read
.replaced-step-000000500   the old one while a second save of its step is renamed in
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path, PurePath
from typing import BinaryIO

from tandem.checkpoint.storage.protocol import (
    MANIFEST,
    STATE,
    STEP_NAME,
    Entries,
    Payload,
    Reader,
    Sink,
    unstale,
)
from tandem.paths import exists, is_directory
from tandem.reading import descriptor

NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems that cannot, and need not
LISTINGS = 10  # at most, of a folder that another writer prunes; NFS may name for a minute what is gone


class FsyncError(OSError):
    """The kernel could not say that the bytes are on disk."""


class _File:
    """An open file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self.size = file, size

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)

    def close(self) -> None:
        self._file.close()


class Folder:
    """A folder on this machine, or on a volume that is mounted here."""

    appears_whole = True

    def __init__(self) -> None:
        self._anchored: Path | None = None  # its name and those above it are on disk

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        return unstale(lambda: _entries(Path(directory)))

    def open(self, path: PurePath, from_disk: bool = False) -> Reader:
        path = Path(path)
        found = descriptor(path.parent.parent, f"{path.parent.name}/{path.name}")
        if from_disk:
            with suppress(OSError):
                os.posix_fadvise(found, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(found).st_size
        if size and not _has_data(found):
            os.close(found)
            raise OSError(errno.EBADMSG, f"{path.name} has a size but no data on disk")
        return _File(os.fdopen(found, "rb"), size)

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        """As `Storage.commit`. After an fsync error the kernel may have dropped the pages it could not write
        and call the next fsync a success: everything is written anew, once, to new files. The same after a
        stale NFS handle."""
        target = Path(target)
        unstale(lambda: self._prepare(target.parent))
        if not replace and unstale(lambda: exists(target)):
            raise FileExistsError(errno.EEXIST, "another writer has already saved this step")
        try:
            return self._write(target, payload, manifest)
        except OSError as error:
            if not isinstance(error, FsyncError) and error.errno != errno.ESTALE:
                raise
            return self._write(target, payload, manifest)

    def _prepare(self, directory: Path) -> None:
        if self._anchored != directory or not is_directory(directory):
            make_directory(directory)
            self._anchored = directory
        _mend(directory)
        _sweep(directory, ".tmp-*")

    def _write(self, target: Path, payload: Payload, manifest: Callable[[Entries], bytes]) -> int:
        temporary = target.with_name(f".tmp-{target.name}-{os.getpid()}-{secrets.token_hex(4)}")
        try:
            os.mkdir(temporary)
            state = write_file(temporary / STATE, payload)
            sealed = write_file(temporary / MANIFEST, manifest({STATE: state.entry()}))
            fsync_directory(temporary)
        except BaseException:
            remove_tree(temporary)
            raise
        _publish(temporary, target)
        return state.bytes + sealed.bytes

    def mend(self, directory: PurePath) -> None:
        """Finish what a killed prune left, and a second save of a step killed between its two renames."""

        def once() -> None:
            _mend(Path(directory))
            _sweep(Path(directory), ".tmp-pruned-*")

        unstale(once)

    def rename(self, source: PurePath, target: PurePath) -> None:
        source, target = Path(source), Path(target)
        if not is_directory(target.parent):
            make_directory(target.parent)
        rename(source, target)
        if source == self._anchored:
            self._anchored = None
        for parent in {target.parent: None, source.parent: None}:
            fsync_directory(parent)

    def remove(self, entries: Sequence[PurePath]) -> None:
        if entries:
            unstale(lambda: _remove([Path(entry) for entry in entries]))


def _has_data(descriptor: int) -> bool:
    """Whether any of a file was ever written: reading a sparse tebibyte takes hours."""
    try:
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        return error.errno != errno.ENXIO
    os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def _entries(directory: Path, tries: int = LISTINGS) -> dict[str, dict[str, int]]:
    """What lies there. Where a writer prunes meanwhile, its newer one is not among the names: asked again."""
    found: dict[str, dict[str, int]] = {}
    for name in os.listdir(directory) if is_directory(directory) else []:
        try:
            if STEP_NAME.fullmatch(name) and (directory / name).is_symlink():
                found[name] = {MANIFEST: 0}  # which says when it is read that it is reached through a link
            elif STEP_NAME.fullmatch(name):
                with os.scandir(directory / name) as files:
                    found[name] = {file.name: file.stat(follow_symlinks=False).st_size for file in files}
            elif is_directory(directory / name):  # what it holds is nobody's business here
                found[name] = {}
        except NotADirectoryError:  # not ours
            continue
        except FileNotFoundError:
            if tries > 1 and not os.path.lexists(directory / name):
                return _entries(directory, tries - 1)
    return found


def _publish(temporary: Path, target: Path) -> None:
    directory, replaced = target.parent, target.with_name(f".replaced-{target.name}")
    try:
        if exists(target):
            rename(target, replaced)
            fsync_directory(directory)  # or else a power loss may keep the next rename alone
        rename(temporary, target)
        fsync_directory(directory)
    except BaseException:  # not known to be on disk: as if it had never been
        with suppress(OSError):  # what this cannot put back, the next save's _prepare does
            if exists(target) and not exists(temporary):
                os.rename(target, temporary)
            if exists(replaced):
                os.rename(replaced, target)
            fsync_directory(directory)
            remove_tree(temporary)
        raise
    remove_tree(replaced)


def _mend(directory: Path) -> None:
    for replaced in directory.glob(".replaced-step-*"):
        target = directory / replaced.name.removeprefix(".replaced-")
        if exists(target / MANIFEST):
            fsync_directory(directory)  # the new one's name is on disk before the old one goes
            remove_tree(replaced)
        else:
            rename(replaced, target)


def _remove(entries: Sequence[Path]) -> None:
    directory = entries[0].parent
    fsync_directory(directory)  # the newest's name is on disk before an older one goes
    for entry in entries:  # renamed first: half removed, it must not look like a damaged one
        with suppress(FileNotFoundError):  # somebody else has just pruned it
            rename(entry, directory / f".tmp-pruned-{entry.name}-{secrets.token_hex(4)}")
    _sweep(directory, ".tmp-pruned-*")


def _sweep(directory: Path, pattern: str) -> None:
    leftovers = list(directory.glob(pattern))
    if leftovers:  # their new names first: half removed under the old ones they would look damaged
        fsync_directory(directory)
    for leftover in leftovers:
        remove_tree(leftover)


def write_file(path: Path, payload: Payload) -> Sink:
    """Write and fsync a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        sink = Sink(lambda data: os.write(descriptor, data))
        sink.take(payload)
        fsync(descriptor)
    finally:
        os.close(descriptor)
    return sink


def fsync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise FsyncError(error.errno, error.strerror) from error


def make_directory(path: Path) -> None:
    """Make `path` with what is missing above it, and put their names on disk, up to the volume's root.

    A directory whose name cannot be put there is removed again: after an fsync error the next fsync may
    say that all is well without it.
    """
    missing = not is_directory(path)
    if missing:
        make_directory(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
    if path.stat().st_dev == path.parent.stat().st_dev and path != path.parent:
        try:
            fsync_directory(path.parent)
        except PermissionError:  # above what is ours, and not made by us
            return
        except FsyncError:
            if missing:
                os.rmdir(path)
            raise
        if not missing:
            make_directory(path.parent)


def fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fsync(descriptor)
    except FsyncError as error:
        if error.errno not in NO_DIRECTORY_FSYNC:
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """os.rename to a free name; NFS may answer ESTALE or ENOENT to a rename that has worked."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT) or exists(source) or not exists(target):
            raise


def remove_tree(path: Path) -> None:
    """As far as it goes: what has to stay is hidden, and the next save tries again."""
    with suppress(OSError):  # ignore_errors lets some of them through
        shutil.rmtree(path, ignore_errors=True)
