"""The file calls under a checkpoint, and the manifest that says what its files must be. No torch here."""

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from tandem.errors import CheckpointError, CorruptCheckpointError

STATE, MANIFEST, FORMAT = "state.pt", "manifest.json", 1
NO_DIRECTORY_FSYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)  # file systems that cannot, and need not
STALE_TRIES = 3
T = TypeVar("T")


class FileSink:
    """What a payload is written to: `write` for torch.save and friends; hashes and counts as it goes."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._digest = hashlib.sha256()
        self.bytes = 0
        self.error: OSError | None = None  # torch.save turns it into a RuntimeError of its own

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        self._digest.update(view)
        written = 0
        try:
            while written < len(view):
                written += os.write(self._descriptor, view[written:])
        except OSError as error:
            self.error = error
            raise
        self.bytes += written
        return written

    def flush(self) -> None:
        """Nothing is buffered here."""

    def entry(self) -> dict[str, object]:
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


Payload = bytes | memoryview | Callable[[FileSink], object]


class FsyncError(OSError):
    """The kernel could not say that the bytes are on disk."""


@contextmanager
def translated(what: str, advice: str = "") -> Iterator[None]:
    """OSError -> CheckpointError, one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what}: {reason}" + (f"; {advice}" if advice else "")) from error


def unstale(action: Callable[[], T]) -> T:
    """`action()`, called again when NFS answers ESTALE: looking the names up anew gets fresh handles."""
    for _ in range(STALE_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return action()


def write_file(path: Path, payload: Payload) -> FileSink:
    """Write and fsync a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        sink = FileSink(descriptor)
        try:
            payload(sink) if callable(payload) else sink.write(payload)
        except Exception:
            if sink.error is not None:
                raise sink.error from None
            raise
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
    missing = not path.is_dir()
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
        if error.errno not in (errno.ESTALE, errno.ENOENT) or source.exists() or not target.exists():
            raise


def remove_tree(path: Path) -> None:
    """As far as it goes: what has to stay is hidden, and the next save tries again."""
    with suppress(OSError):  # ignore_errors lets some of them through
        shutil.rmtree(path, ignore_errors=True)


def render_manifest(step: int, files: dict[str, dict[str, object]], info: dict[str, Any]) -> bytes:
    body = {"format": FORMAT, "step": step, "written_at": time.time(), "files": files, "info": info}
    return seal(json.loads(json.dumps(body, default=str)))  # as JSON will have it: keys are text


def seal(body: dict[str, Any]) -> bytes:
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    return (json.dumps({**body, "manifest_sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def parse_manifest(path: Path, raw: bytes) -> dict[str, Any]:
    """Raises CorruptCheckpointError unless these are the very bytes that `seal` made."""
    try:
        body = json.loads(raw)
        del body["manifest_sha256"]
        whole = seal(body) == raw
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 does not hold")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']}; this tandem reads {FORMAT}, use a newer")
    manifest: dict[str, Any] = body
    return manifest


def read_or_corrupt(path: Path, read: Callable[[int], T]) -> T:
    """`read(descriptor)` of a file. A missing file raises CorruptCheckpointError, a failing volume
    CheckpointError."""

    def once() -> T:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return read(descriptor)
        finally:
            os.close(descriptor)

    with translated(f"cannot read {path}"):
        try:
            return unstale(once)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None


def content(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        return file.read()


def size_and_sha256(descriptor: int) -> tuple[int, str]:
    """Of the bytes on the disk, where the kernel lets us forget those in memory."""
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    with os.fdopen(descriptor, "rb", closefd=False) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return os.fstat(descriptor).st_size, digest


def check(path: Path, wanted: dict[str, Any], size: int, digest: str) -> None:
    if size != wanted["bytes"]:
        raise CorruptCheckpointError(f"{path} has {size} bytes, {wanted['bytes']} were written")
    if digest != wanted["sha256"]:
        raise CorruptCheckpointError(f"{path} is damaged: its SHA-256 is not that of the bytes written")
