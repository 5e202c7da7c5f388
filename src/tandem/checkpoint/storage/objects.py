"""Keep checkpoints on an object store, through fsspec: upload the manifest last, only if there is none.

Every save writes its state under a unique name, so two writers never mix their bytes. A state without a
manifest does not count, and is removed a day later. The client libraries retry requests that fail with 5xx or
get no response; if the retries fail too, the save fails.
"""

import errno
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Any

from tandem.checkpoint.storage.protocol import MANIFEST, STATE, Entries, Payload, Sink, StorageReader
from tandem.errors import ConfigError
from tandem.timeouts import LEFT_OVER_SECONDS

INSTALL = {"s3": "'tandem-train[s3]'", "gs": "gcsfs", "az": "adlfs"}


def call_client(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return `call(...)`; convert errors of the client library to OSErrors with a one-line message."""
    try:
        return call(*arguments, **options)
    except OSError:
        raise
    except Exception as error:
        name = type(error).__name__
        reason = (str(error) or "no answer").splitlines()[0]
        # The store treats EBADMSG as damage, and other errors as a failing volume.
        raise OSError(errno.EBADMSG if "Checksum" in name else errno.EIO, f"{name}: {reason}") from error


class _Reader:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = int(file.size)

    def read(self, size: int = -1, /) -> bytes:
        return bytes(call_client(self._file.read, size))

    def seek(self, offset: int, /) -> None:
        call_client(self._file.seek, offset)

    def close(self) -> None:
        self._file.close()


class Objects:
    """One kind of object store by its fsspec name ("s3", "gs", "az"), with fsspec's configuration.

    fsspec reads the bucket from each path, so the bucket given here is not used.
    """

    is_atomic = False

    def __init__(self, scheme: str, _bucket: str) -> None:
        try:
            import fsspec

            # Other processes write there as well, and a cached listing would not show their checkpoints.
            self._fs = fsspec.filesystem(scheme, use_listings_cache=False)
        except ImportError as error:
            library = INSTALL.get(scheme, f"fsspec and its implementation of {scheme}")
            raise ConfigError(
                f"{scheme}:// needs a library that is not installed; pip install {library}"
            ) from error

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for key, size in self._keys(directory).items():
            entry, _, name = key.partition("/")
            if name:
                found.setdefault(entry, {})[name] = size
        return found

    def _keys(self, directory: PurePath) -> dict[str, int]:
        """Return {key below `directory`: bytes}."""
        prefix = self._fs._strip_protocol(str(directory)) + "/"
        with suppress(FileNotFoundError):
            found = call_client(self._fs.find, str(directory), detail=True)
            return {key.removeprefix(prefix): int(info["size"]) for key, info in found.items()}
        return {}

    def open(self, path: PurePath, from_disk: bool = False) -> StorageReader:
        return _Reader(call_client(self._fs.open, str(path), "rb"))

    def read(self, path: PurePath) -> bytes | None:
        """Return the contents of a small object; None if it does not exist."""
        with suppress(FileNotFoundError):
            return bytes(call_client(self._fs.cat_file, str(path)))
        return None

    def write(self, path: PurePath, data: bytes, mode: str = "overwrite") -> None:
        """Upload an object. `mode` "create": only if none exists, on servers that support the condition."""
        call_client(self._fs.pipe_file, str(path), data, mode=mode)

    def create(self, path: PurePath, data: bytes) -> bool:
        """Create an object unless one exists; return True if the existing object is now this one."""
        held, lost = self._put(path, data, replace=False)
        if held is None:
            raise lost or OSError(errno.EIO, "an uploaded object is missing from the store")
        return held == data

    def _put(self, path: PurePath, data: bytes, replace: bool) -> tuple[bytes | None, OSError | None]:
        """Upload an object; return (its contents afterwards, the error of the upload)."""
        lost: OSError | None = None
        if replace or self.read(path) is None:  # check first, for servers that ignore the condition
            try:
                self.write(path, data, "overwrite" if replace else "create")
            except OSError as error:  # the upload may have succeeded with only the response lost
                lost = error
        return self.read(path), lost

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        name, entry = self.add(target, STATE, payload)
        return self.publish(target, target, {name: entry}, manifest, replace)

    def begin(self, target: PurePath, replace: bool) -> PurePath:
        if not replace and self.read(target / MANIFEST) is not None:
            raise FileExistsError(errno.EEXIST, "another writer has already saved this step")
        return target

    def add(self, pending: PurePath, name: str, payload: Payload) -> tuple[str, dict[str, object]]:
        stem, _, suffix = name.rpartition(".")
        unique = f"{stem}-{secrets.token_hex(8)}.{suffix}"
        return unique, self._upload(str(pending / unique), payload).entry()

    def publish(
        self,
        pending: PurePath,
        target: PurePath,
        files: Entries,
        manifest: Callable[[Entries], bytes],
        replace: bool,
    ) -> int:
        raw = manifest(files)
        held, lost = self._put(target / MANIFEST, raw, replace)
        if held != raw:
            if held is not None and not replace:
                raise FileExistsError(errno.EEXIST, "another writer has already saved this step") from lost
            raise lost or OSError(errno.EIO, "the manifest in the store is not the one that was uploaded")
        # Earlier saves of this step left states under other names.
        if replace:
            self.delete(target, self._keys(target).keys() - files.keys() - {MANIFEST})
        return sum(int(str(entry["bytes"])) for entry in files.values()) + len(raw)

    def abandon(self, pending: PurePath) -> None:
        """Leave the cleanup to `repair`, because another save of the step may have objects there."""

    def _upload(self, path: str, payload: Payload) -> Sink:
        file = call_client(self._fs.open, path, "wb")
        sink = Sink(lambda data: call_client(file.write, data))
        try:
            sink.take(payload)
            call_client(file.close)
        except BaseException:
            with suppress(AttributeError):  # not all file classes of fsspec allow setting it
                file.closed = True  # otherwise the destructor uploads the incomplete data
            with suppress(Exception):
                file.discard()
            raise
        if (size := call_client(self._fs.info, path)["size"]) != sink.bytes:
            raise OSError(errno.EIO, f"only {size} of {sink.bytes} bytes were uploaded")
        return sink

    def repair(self, directory: PurePath) -> None:
        # A younger state without a manifest may belong to a save in progress.
        before = datetime.now(UTC) - timedelta(seconds=LEFT_OVER_SECONDS)
        for entry, names in self.list(directory).items():
            for path in [directory / entry / name for name in names if MANIFEST not in names]:
                if call_client(self._fs.modified, str(path)) < before:
                    call_client(self._fs.rm_file, str(path))

    def rename(self, source: PurePath, target: PurePath) -> None:
        # The manifest is copied last and removed first, so no step ever has a manifest without its state.
        for key in sorted(self._keys(source), key=lambda key: key.endswith(MANIFEST)):
            call_client(self._fs.cp_file, str(source / key), str(target / key))
        self.remove([source])

    def remove(self, entries: Sequence[PurePath]) -> None:
        for entry in entries:
            self.delete(entry, sorted(self._keys(entry), key=lambda key: not key.endswith(MANIFEST)))

    def delete(self, directory: PurePath, keys: Iterable[str]) -> None:
        """Delete these objects below `directory`, in this order; missing ones are skipped."""
        for key in keys:
            with suppress(FileNotFoundError):
                call_client(self._fs.rm_file, str(directory / key))
