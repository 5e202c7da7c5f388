"""Remote copies of the files of a run whose run directory is an address.

Logs, TensorBoard files, profiles and reports stay in the local directory. The files in `layout.COPIED` are
written there as in any run. They are copied to the store before every checkpoint and at the end, so the
journal there always covers the newest checkpoint. When the run resumes with an empty disk, they are copied
back.
"""

import logging
from pathlib import Path, PurePath

from tandem import layout
from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import Remote
from tandem.config.address import RemotePath
from tandem.paths import exists

log = logging.getLogger("tandem.run")


class Mirror:
    """Copies at `where` of the files in `folder`; does nothing for a run in a local directory."""

    def __init__(self, where: PurePath, folder: Path) -> None:
        self._where = where
        self._folder = folder
        self._pushed: dict[str, tuple[int, int]] = {}

    def _store(self) -> Remote | None:
        return remote_at(self._where) if isinstance(self._where, RemotePath) else None

    def fetch(self) -> None:
        """Copy the files from the store to the folder, unless it already has the same content or more.

        Raises OSError.
        """
        if (store := self._store()) is None:
            return
        folder = self._folder
        # One decision for both files of the journal, because a rotation moves lines from one to the other.
        # See docs/architecture.md#where-checkpoints-are-stored.
        has_more_events = self._has_more_events(store)
        for name in layout.COPIED:
            if name.startswith(layout.EVENTS) and has_more_events:
                continue
            content = store.read(self._where / name)
            path = folder / name
            if name == layout.TRACKER and exists(path):
                continue  # it is written more often than it is copied, so the local one is newer
            if content is None:
                # The store lacks a file that was deleted there, such as the summary of an earlier end.
                path.unlink(missing_ok=True)
            # A local file that begins with the copy has the same history and more lines.
            elif not exists(path) or not path.read_bytes().startswith(content):
                path.write_bytes(content)

    def _has_more_events(self, store: Remote) -> bool:
        """Return True if the local events.jsonl was rotated since its copy, which the older file contains."""
        content = store.read(self._where / layout.EVENTS)
        path = self._folder / (layout.EVENTS + layout.OLDER)
        return bool(content) and exists(path) and path.read_bytes().startswith(content or b"")

    def begin(self, config: bytes, keeps_summary: bool = False) -> None:
        """Prepare the store at the start of a run: get the journal back, delete the outdated summary.

        Raises OSError.
        """
        if (store := self._store()) is not None:
            # Both calls come before `fetch`, which would bring the earlier launch's files back into the
            # folder.
            store.write(self._where / layout.CONFIG, config)
            if not keeps_summary:
                store.delete(self._where, [layout.SUMMARY])
            self.fetch()

    def push(self) -> None:
        """Copy files that have changed. If the store fails, log a warning; the next push tries again."""
        if (store := self._store()) is None:
            return
        for name in layout.COPIED:
            try:
                # Read before the content: a line that is appended in between causes another copy and is not
                # missed.
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
