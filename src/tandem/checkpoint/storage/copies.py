"""Local working directory of a run whose run directory is an address, and remote copies of its files.

Logs, TensorBoard files, profiles and reports stay in the local directory. RUN_FILES are written there as in
any run. They are copied to the store before every checkpoint and at the end, so the journal there always
covers the newest checkpoint. When the run resumes with an empty disk, they are copied back.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath

from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import Remote
from tandem.config.address import RemotePath, address
from tandem.paths import exists

log = logging.getLogger("tandem.run")

RUN_FILES = (
    "about.json",
    "config.json",
    "events.jsonl",  # copied before events.jsonl.1: it begins with the counts of that file
    "events.jsonl.1",
    "metrics.jsonl",
    "metrics.prom",
    "summary.json",
    "tracker.json",
)


def local_folder(run_dir: str | PurePath) -> Path:
    """Return the run directory itself, or for an address this user's directory in the temporary directory."""
    where = address(run_dir)
    if isinstance(where, Path):
        return where
    return Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}", *where.parts[1:])


def make_folder(folder: Path) -> None:
    """Create a `local_folder`. Raises OSError.

    A directory below the temporary directory must belong to this user, so that no other user can plant files
    there.
    """
    top = Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}")
    if folder.is_relative_to(top):
        top.mkdir(mode=0o700, exist_ok=True)
        if top.is_symlink() or top.stat().st_uid != os.getuid():
            raise PermissionError(f"{top} belongs to another user; remove it or set TMPDIR")
    folder.mkdir(parents=True, exist_ok=True)


class Copies:
    """Copies of the run's files at its address; does nothing for a run in a local directory."""

    def __init__(self, run_dir: str | PurePath) -> None:
        self._where, self._folder = address(run_dir), local_folder(run_dir)
        self._pushed: dict[str, tuple[int, int]] = {}

    def _store(self) -> Remote | None:
        return remote_at(self._where) if isinstance(self._where, RemotePath) else None

    def fetch(self, folder: Path) -> None:
        """Copy the files from the store to `folder`, unless it already has the same content or more.

        Raises OSError.
        """
        if (store := self._store()) is None:
            return
        has_more_events = self._has_more_events(folder, store)
        for name in RUN_FILES:
            if name.startswith("events.jsonl") and has_more_events:
                continue
            content, path = store.read(self._where / name), folder / name
            if name == "tracker.json" and exists(path):
                continue  # it is written more often than it is copied, so the local one is newer
            if content is None:
                path.unlink(missing_ok=True)
            # A local file that begins with the copy has the same history and more lines.
            elif not exists(path) or not path.read_bytes().startswith(content):
                path.write_bytes(content)

    def _has_more_events(self, folder: Path, store: Remote) -> bool:
        """Return True if the local events.jsonl was rotated since its copy, which the older file contains."""
        content, path = store.read(self._where / "events.jsonl"), folder / "events.jsonl.1"
        return bool(content) and exists(path) and path.read_bytes().startswith(content or b"")

    def begin(self, config: bytes, keeps_summary: bool = False) -> None:
        """Prepare the store at the start of a run: get the journal back, delete the outdated summary.

        Raises OSError.
        """
        if (store := self._store()) is not None:
            store.write(self._where / "config.json", config)
            if not keeps_summary:
                store.delete(self._where, ["summary.json"])
            self.fetch(self._folder)

    def push(self) -> None:
        """Copy files that have changed. If the store fails, log a warning; the next push tries again."""
        if (store := self._store()) is None:
            return
        for name in RUN_FILES:
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
    """Yield a local directory with the RUN_FILES of a run, wherever it is stored. Raises OSError."""
    if isinstance(where := address(run_dir), Path):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        Copies(where).fetch(Path(folder))
        yield Path(folder)
