"""What a store of checkpoints asks of the place they lie in, and what is written there. No torch here.

An entry is a directory with the files of one checkpoint; MANIFEST says that it is whole.
"""

import errno
import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Protocol, TypeVar

STATE, MANIFEST = "state.pt", "manifest.json"
STEP_NAME = re.compile(r"step-(\d{9,})")
STALE_TRIES = 3
T = TypeVar("T")


class Sink:
    """What a payload is written to: `write` for torch.save and friends; hashes and counts as it goes."""

    def __init__(self, write: Callable[[memoryview], int]) -> None:
        self._write, self._digest = write, hashlib.sha256()
        self.bytes = 0
        self._error: OSError | None = None  # torch.save turns it into a RuntimeError of its own

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
        """Nothing is buffered here."""

    def take(self, payload: "Payload") -> None:
        """Write all of `payload`. Raises OSError where the place fails, and what the payload raises."""
        try:
            payload(self) if callable(payload) else self.write(payload)
        except Exception:
            if self._error is not None:
                raise self._error from None
            raise

    def entry(self) -> dict[str, object]:
        """What the manifest says of this file."""
        return {"bytes": self.bytes, "sha256": self._digest.hexdigest()}


Payload = bytes | memoryview | Callable[[Sink], object]
Entries = dict[str, dict[str, object]]
"""{file: its `Sink.entry`}"""


def unstale(action: Callable[[], T]) -> T:
    """`action()`, called again when NFS answers ESTALE: looking the names up anew gets fresh handles."""
    for _ in range(STALE_TRIES - 1):
        try:
            return action()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
    return action()


class Reader(Protocol):
    """An open file, of `size` bytes when it was opened."""

    @property
    def size(self) -> int: ...
    def read(self, size: int = -1, /) -> bytes: ...
    def close(self) -> None: ...


class Storage(Protocol):
    """Where checkpoints lie. All methods raise OSError; FileNotFoundError where there is no such file.

    `appears_whole`: an entry gets its name with all its files in it, so one without a manifest is damage.
    """

    @property
    def appears_whole(self) -> bool: ...

    def list(self, directory: PurePath) -> dict[str, dict[str, int]]:
        """{entry: {file: bytes}} of what lies in `directory`, nothing where that is not there.

        Never without both of two entries of which a writer has added one before it removed the other.
        """

    def open(self, path: PurePath, from_disk: bool = False) -> Reader:
        """The file to read; `from_disk`: its bytes as they lie there, not as memory remembers them.

        What is there and is no file (a pipe, a device, a link, a directory) is EBADMSG, as damage is.
        """

    def commit(
        self, target: PurePath, payload: Payload, manifest: Callable[[Entries], bytes], replace: bool
    ) -> int:
        """Write an entry, the manifest last; when this returns it is there for good, whole. Its bytes.

        Killed or failing before, it has never been. Raises FileExistsError where it is there already,
        unless `replace` is set.
        """

    def mend(self, directory: PurePath) -> None:
        """Finish or undo what a killed writer has left half done in `directory`."""

    def rename(self, source: PurePath, target: PurePath) -> None:
        """Give a directory another name, which is free."""

    def remove(self, entries: Sequence[PurePath]) -> None:
        """Remove entries, so that none of them is ever seen half removed with a manifest."""


class Remote(Storage, Protocol):
    """A storage that an address names. The run's own small files are copied to it, too (`run/mirror.py`)."""

    def read(self, path: PurePath) -> bytes | None:
        """The whole of a small file; None where there is none."""

    def write(self, path: PurePath, data: bytes) -> None:
        """Put a small file where none or another one is; directories on the way to it are made.

        Whoever reads meanwhile gets all of the one or of the other: an owner's note is written every few
        seconds, and others look at it.
        """

    def create(self, path: PurePath, data: bytes) -> bool:
        """Put a small file, unlike any other, where there is none; whether it is the one there now."""

    def delete(self, directory: PurePath, names: Iterable[str]) -> None:
        """Delete these files of `directory`, in this order, as far as they are there."""
