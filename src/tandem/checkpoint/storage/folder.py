"""Keep checkpoints in a local directory or on a mounted volume: complete and on disk, or nonexistent.

step-000000500/              an entry, renamed into place with all its files
.tmp-...                     being written or removed, or left by a killed writer; never read
.replaced-step-000000500/    the old entry, while a second save of its step is renamed into place
"""

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BufferedReader, FileIO
from pathlib import Path, PurePath

from tandem.bounded_reader import descriptor
from tandem.checkpoint.storage.protocol import (
    MANIFEST,
    STATE,
    STEP_NAME,
    Entries,
    Payload,
    Sink,
    StorageReader,
    retry_stale,
)
from tandem.paths import exists, is_directory

# Returned by file systems that do not support it and do not need it.
NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
LISTINGS = 10  # at most, while another writer prunes; NFS may list deleted names for a minute


class FsyncError(OSError):
    """An fsync failed, so it is unknown whether the bytes are on disk."""


class _File(BufferedReader):
    """An open file, with its size when it was opened."""

    def __init__(self, descriptor: int, size: int) -> None:
        super().__init__(FileIO(descriptor))
        self.size = size


class Folder:
    """A directory on this machine, or on a volume that is mounted here."""

    is_atomic = True

    def __init__(self) -> None:
        self._anchored: Path | None = None  # this directory's name and those above it are on disk

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        return retry_stale(lambda: _entries(Path(directory)))

    def open(self, path: PurePath, from_disk: bool = False) -> StorageReader:
        path = Path(path)
        found = descriptor(path.parent.parent, f"{path.parent.name}/{path.name}")
        if from_disk:
            with suppress(OSError):
                # Drop the page cache, so that the following reads come from the disk. This is only advice,
                # and some file systems refuse it.
                os.posix_fadvise(found, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(found).st_size
        if size and not _has_data(found):
            os.close(found)
            raise OSError(errno.EBADMSG, f"{path.name} has a size but no data on disk")
        return _File(found, size)

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        """Implement `Storage.commit`, and retry once after an fsync error or a stale NFS handle.

        After an fsync error, Linux may drop the pages that it could not write and report the next fsync as a
        success. The retry therefore writes everything again, to new files.
        """
        target = Path(target)
        self._check(target, replace)
        try:
            return self._write(target, payload, manifest)
        except OSError as error:
            if not isinstance(error, FsyncError) and error.errno != errno.ESTALE:
                raise
            return self._write(target, payload, manifest)

    def _check(self, target: Path, replace: bool) -> None:
        retry_stale(lambda: self._prepare(target.parent))
        if not replace and retry_stale(lambda: exists(target)):
            raise FileExistsError(errno.EEXIST, "another writer has already saved this step")

    def begin(self, target: PurePath, replace: bool) -> PurePath:
        target = Path(target)
        self._check(target, replace)
        temporary = _temporary(target)
        os.mkdir(temporary)
        return temporary

    def add(self, pending: PurePath, name: str, payload: Payload) -> tuple[str, dict[str, object]]:
        return name, write_file(Path(pending) / name, payload).entry()

    def publish(
        self,
        pending: PurePath,
        target: PurePath,
        files: Entries,
        manifest: Callable[[Entries], bytes],
        replace: bool,
    ) -> int:
        temporary = Path(pending)
        # Other nodes have written some of them, and may have another volume mounted at this path.
        for name, entry in files.items():
            size = (temporary / name).stat().st_size
            if size != entry["bytes"]:
                raise OSError(errno.EIO, f"{name} has {size} bytes here, and {entry['bytes']} on its node")
        sealed = write_file(temporary / MANIFEST, manifest(files))
        # The files' names must be on disk before the directory gets its final name.
        fsync_directory(temporary)
        if not replace and exists(Path(target)):
            raise FileExistsError(errno.EEXIST, "another writer has already saved this step")
        _publish(temporary, Path(target))
        return sum(int(str(entry["bytes"])) for entry in files.values()) + sealed.bytes

    def abandon(self, pending: PurePath) -> None:
        remove_tree(Path(pending))

    def _prepare(self, directory: Path) -> None:
        if self._anchored != directory or not is_directory(directory):
            make_directory(directory)
            self._anchored = directory
        _repair(directory)
        _sweep(directory, ".tmp-*")

    def _write(self, target: Path, payload: Payload, manifest: Callable[[Entries], bytes]) -> int:
        temporary = _temporary(target)
        try:
            os.mkdir(temporary)
            name, entry = self.add(temporary, STATE, payload)
            return self.publish(temporary, target, {name: entry}, manifest, replace=True)
        except BaseException:
            remove_tree(temporary)
            raise

    def repair(self, directory: PurePath) -> None:
        """Finish an interrupted prune, or a second save of a step killed between its two renames."""

        def once() -> None:
            if is_directory(directory):
                _repair(Path(directory))
                _sweep(Path(directory), ".tmp-pruned-*")

        retry_stale(once)

    def rename(self, source: PurePath, target: PurePath) -> None:
        source = Path(source)
        target = Path(target)
        if not is_directory(target.parent):
            make_directory(target.parent)
        rename(source, target)
        # The next save must create the directory again and fsync its name.
        if source == self._anchored:
            self._anchored = None
        # The dict removes duplicates and keeps the order: after a power loss, two names beat none.
        for parent in {target.parent: None, source.parent: None}:
            fsync_directory(parent)

    def remove(self, entries: Sequence[PurePath]) -> None:
        if entries:
            retry_stale(lambda: _remove([Path(entry) for entry in entries]))


def _has_data(descriptor: int) -> bool:
    """Return True if any data was ever written to the file: reading a sparse file of a TiB takes hours."""
    try:
        os.lseek(descriptor, 0, os.SEEK_DATA)
    except OSError as error:
        # ENXIO means no data after the offset. After other errors, the file system cannot tell.
        return error.errno != errno.ENXIO
    os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def _entries(directory: Path, tries: int = LISTINGS) -> dict[str, dict[str, int]]:
    """List the entries, again if one of them was pruned while its files were listed.

    A writer that prunes has a newer checkpoint, which may not be in the first list of names.
    """
    found: dict[str, dict[str, int]] = {}
    for name in os.listdir(directory) if is_directory(directory) else []:
        try:
            if STEP_NAME.fullmatch(name) and (directory / name).is_symlink():
                found[name] = {MANIFEST: 0}  # reading it then reports the symbolic link
            elif STEP_NAME.fullmatch(name):
                with os.scandir(directory / name) as files:
                    found[name] = {file.name: file.stat(follow_symlinks=False).st_size for file in files}
            elif is_directory(directory / name):  # its contents do not matter here
                found[name] = {}
        except NotADirectoryError:  # not an entry: a file with the name of a step
            continue
        except FileNotFoundError:
            if tries > 1 and not os.path.lexists(directory / name):
                return _entries(directory, tries - 1)
    return found


def _temporary(target: Path) -> Path:
    # Use the same directory, because rename(2) does not cross file systems.
    return target.with_name(f".tmp-{target.name}-{os.getpid()}-{secrets.token_hex(4)}")


def _publish(temporary: Path, target: Path) -> None:
    directory, replaced = target.parent, target.with_name(f".replaced-{target.name}")
    try:
        if exists(target):
            rename(target, replaced)
            fsync_directory(directory)  # otherwise a power loss may keep only the next rename
        rename(temporary, target)
        fsync_directory(directory)
    except BaseException:  # it may not be on disk, so undo the rename
        with suppress(OSError):  # the _prepare of the next save restores what this cannot
            if exists(target) and not exists(temporary):
                os.rename(target, temporary)
            if exists(replaced):
                os.rename(replaced, target)
            fsync_directory(directory)
            remove_tree(temporary)
        raise
    remove_tree(replaced)


def _repair(directory: Path) -> None:
    for replaced in directory.glob(".replaced-step-*"):
        target = directory / replaced.name.removeprefix(".replaced-")
        if exists(target / MANIFEST):
            fsync_directory(directory)  # the new entry's name must be on disk before the old one is removed
            remove_tree(replaced)
        else:
            rename(replaced, target)


def _remove(entries: Sequence[Path]) -> None:
    directory = entries[0].parent
    fsync_directory(directory)  # the newest entry's name must be on disk before an older one is removed
    for entry in entries:  # rename first: a partly removed entry must not look damaged
        with suppress(FileNotFoundError):  # another process has just pruned it
            rename(entry, directory / f".tmp-pruned-{entry.name}-{secrets.token_hex(4)}")
    _sweep(directory, ".tmp-pruned-*")


def _sweep(directory: Path, pattern: str) -> None:
    leftovers = list(directory.glob(pattern))
    # The new names must be on disk first: under the old ones, a partly removed entry would look damaged.
    if leftovers:
        fsync_directory(directory)
    for leftover in leftovers:
        remove_tree(leftover)


def write_file(path: Path, payload: Payload) -> Sink:
    """Write and fsync a new file. Raises OSError, and FsyncError if only the fsync failed."""
    # O_EXCL: two writers must never mix their bytes in one file.
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
    """Create `path` and missing parents, and fsync all names up to the root of the volume.

    If a new directory's name cannot be fsynced, the directory is removed again. Otherwise the next attempt
    would find the directory and its fsync could report success, although the name is not on disk.
    """
    missing = not is_directory(path)
    if missing:
        make_directory(path.parent)
        with suppress(FileExistsError):
            os.mkdir(path)
    # Names above the mount point belong to another volume. The root directory is its own parent.
    if path.stat().st_dev == path.parent.stat().st_dev and path != path.parent:
        try:
            fsync_directory(path.parent)
        except PermissionError:  # above our own directories, and not created by us
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
    """Call os.rename to an unused name; NFS may return ESTALE or ENOENT for a rename that succeeded."""
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno not in (errno.ESTALE, errno.ENOENT) or exists(source) or not exists(target):
            raise


def remove_tree(path: Path) -> None:
    """Remove as much as possible. The rest has a hidden name, and the next save tries again."""
    with suppress(OSError):  # some errors pass through despite ignore_errors
        shutil.rmtree(path, ignore_errors=True)
