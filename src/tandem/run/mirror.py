"""The files of a run whose directory is at an address: written to a local folder, and copied there.

Logs, TensorBoard, profiles and reports stay in the folder. `layout.COPIED` are written there as in any run;
copies of them go to the store before every checkpoint and at the end, so the journal there always reaches
as far as the newest checkpoint, and they come back when the run goes on with an empty disk.
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
    """The copies at `where` of the files in `folder`; nothing to do for a run in a folder."""

    def __init__(self, where: PurePath, folder: Path) -> None:
        self._where, self._folder = where, folder
        self._pushed: dict[str, tuple[int, int]] = {}

    def _store(self) -> Remote | None:
        return remote_at(self._where) if isinstance(self._where, RemotePath) else None

    def fetch(self) -> None:
        """Bring what is on the store to the folder, unless that has the same and more. Raises OSError."""
        if (store := self._store()) is None:
            return
        folder, has_more_events = self._folder, self._has_more_events(store)
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

    def _has_more_events(self, store: Remote) -> bool:
        """Whether events.jsonl here has been put aside since it was copied: the older one has the copy."""
        content, path = store.read(self._where / layout.EVENTS), self._folder / (layout.EVENTS + layout.OLDER)
        return bool(content) and exists(path) and path.read_bytes().startswith(content or b"")

    def begin(self, config: bytes, keeps_summary: bool = False) -> None:
        """A run begins here: its journal comes back, its summary is no longer true. Raises OSError."""
        if (store := self._store()) is not None:
            store.write(self._where / layout.CONFIG, config)
            if not keeps_summary:
                store.delete(self._where, [layout.SUMMARY])
            self.fetch()

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
