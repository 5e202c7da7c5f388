"""A run whose directory is at an address: what needs a local folder, and the copies of what it writes.

Logs, TensorBoard, profiles and reports stay in the folder. `layout.COPIED` are written there as in any run;
copies of them go to the store before every checkpoint and at the end, so the journal there always reaches
as far as the newest checkpoint, and they come back when the run goes on with an empty disk.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from tandem import layout
from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import Remote
from tandem.config.address import RemotePath, address
from tandem.paths import exists

log = logging.getLogger("tandem.run")


def local_folder(run_dir: str | PurePath) -> Path:
    """The run directory itself, or this user's folder for it in the temporary directory."""
    where = address(run_dir)
    if isinstance(where, Path):
        return where
    return Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}", *where.parts[1:])


def make_folder(folder: Path) -> None:
    """Make a `local_folder`; one in the temporary directory is this user's alone. Raises OSError."""
    top = Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}")
    if folder.is_relative_to(top):
        top.mkdir(mode=0o700, exist_ok=True)
        if top.is_symlink() or top.stat().st_uid != os.getuid():
            raise PermissionError(f"{top} belongs to another user; remove it or set TMPDIR")
    folder.mkdir(parents=True, exist_ok=True)


class Copies:
    """The run's files where its address says; nothing to do for a run in a folder."""

    def __init__(self, run_dir: str | PurePath) -> None:
        self._where, self._folder = address(run_dir), local_folder(run_dir)
        self._pushed: dict[str, tuple[int, int]] = {}

    def _store(self) -> Remote | None:
        return remote_at(self._where) if isinstance(self._where, RemotePath) else None

    def fetch(self, folder: Path) -> None:
        """Bring what is on the store to `folder`, unless that has the same and more. Raises OSError."""
        if (store := self._store()) is None:
            return
        has_more_events = self._has_more_events(folder, store)
        for name in layout.COPIED:
            if name.startswith(layout.EVENTS) and has_more_events:
                continue
            content, path = store.read(self._where / name), folder / name
            if name == layout.TRACKER and exists(path):
                continue  # it is written oftener than copied
            if content is None:
                path.unlink(missing_ok=True)
            elif not exists(path) or not path.read_bytes().startswith(content):
                path.write_bytes(content)

    def _has_more_events(self, folder: Path, store: Remote) -> bool:
        """Whether events.jsonl here has been put aside since it was copied: the older one has the copy."""
        content, path = store.read(self._where / layout.EVENTS), folder / (layout.EVENTS + layout.OLDER)
        return bool(content) and exists(path) and path.read_bytes().startswith(content or b"")

    def begin(self, config: bytes, keeps_summary: bool = False) -> None:
        """A run begins here: its journal comes back, its summary is no longer true. Raises OSError."""
        if (store := self._store()) is not None:
            store.write(self._where / layout.CONFIG, config)
            if not keeps_summary:
                store.delete(self._where, [layout.SUMMARY])
            self.fetch(self._folder)

    def push(self) -> None:
        """Put what has changed since; a store that fails is a warning, the next push tries again."""
        if (store := self._store()) is None:
            return
        for name in layout.COPIED:
            try:
                state = (self._folder / name).stat()
                mark = (state.st_size, state.st_mtime_ns)
                if self._pushed.get(name) != mark:
                    store.write(self._where / name, (self._folder / name).read_bytes())
                    self._pushed[name] = mark
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("cannot copy %s to %s: %s", name, self._where, error)
                return


@contextmanager
def at_hand(run_dir: str | PurePath) -> Iterator[Path]:
    """A folder with the files of a run that are copied, wherever it lies. Raises OSError."""
    if isinstance(where := address(run_dir), Path):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        Copies(where).fetch(Path(folder))
        yield Path(folder)
