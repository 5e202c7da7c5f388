"""The run directory, opened once: its location, its local directory, and access to everything in it.

`layout.py` has the names of its files. Does not import torch, because commands that only read use it, too.
"""

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from tandem import layout
from tandem.bounded_reader import RunFiles
from tandem.checkpoint.storage import remote_at
from tandem.checkpoint.storage.protocol import Remote
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.config.address import RemotePath, address
from tandem.errors import ConfigError
from tandem.paths import exists
from tandem.platforms.detection import Placement
from tandem.run.lease import Token, fence
from tandem.telemetry.journal import Journal, read_events, write_json_atomic

# Remote copies of the files of a run whose run directory is an address.
#
# Logs, TensorBoard files, profiles and reports stay in the local directory. The files in `layout.COPIED` are
# written there as in any run. They are copied to the store before every checkpoint and at the end, so the
# journal there always covers the newest checkpoint. When the run resumes with an empty disk, they are copied
# back.

log = logging.getLogger("tandem.launch")


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
            if name == layout.GOODPUT and exists(path) and path.stat().st_size >= len(content or b""):
                continue  # the same, unless another machine has added lines; lines have one length
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
        """Prepare the store at the start of a run: fetch the journal, delete the outdated summary.

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
                # Read it before the content: a line that is appended in between then causes another copy.
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


class RunDir:
    """The run directory at `where`: a Path, or a RemotePath for s3://BUCKET/PREFIX.

    The constructor touches no file. `folder` is the local directory: the run directory itself, or for an
    address this user's directory in the temporary directory, whose files are copied to the address. `token`
    is the fencing token of this process's launch, which is checked before each checkpoint is published;
    without one, nothing is checked.
    """

    def __init__(self, where: str | PurePath, token: Token | None = None, folder: Path | None = None) -> None:
        """Raises ConfigError for an invalid address."""
        self.where = address(where)
        self.folder = folder or (self.where if isinstance(self.where, Path) else _temporary(self.where))
        self.logs = self.folder / layout.LOG
        self._token = token

    @classmethod
    def open(cls, settings: Settings, placement: Placement, now: float) -> "RunDir":
        """Return the run directory of a launch.

        The default name contains the time, so it is only for a laptop: other nodes would pick another time.
        Raises ConfigError elsewhere if no run directory is set.
        """
        run_dir = settings.run.run_dir
        if run_dir is None:
            if placement.platform != "none":
                raise ConfigError(
                    "no run directory is set, and all ranks need the same one; set TANDEM_RUN_DIR=runs/NAME "
                    "before the command, or give --run-dir runs/NAME; several nodes need a shared volume"
                )
            name = settings.run.task.rpartition(":")[2] if ":" in settings.run.task else settings.run.task
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
            # With microseconds, because a loop in a shell starts several launches within a second.
            run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}-{int(now % 1 * 1e6):06d}"
        return cls(run_dir.absolute() if isinstance(run_dir, Path) else run_dir)

    @classmethod
    def of(cls, settings: Settings, token: Token | None = None) -> "RunDir":
        """Return the run directory in settings from `recorded`, for ranks, which get only the settings."""
        assert settings.run.run_dir is not None
        return cls(settings.run.run_dir, token)

    def recorded(self, settings: Settings) -> Settings:
        """Return the settings with absolute paths, for the ranks and for config.json."""
        return settings.replace(run_dir=self.where, data_dir=settings.data.data_dir.absolute())

    @property
    def is_here(self) -> bool:
        """Whether it is a local directory and not an address."""
        return isinstance(self.where, Path)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        """The run's checkpoints. Raises ConfigError if the library for the address is not installed."""
        # Create it on first use: the library for an address may be missing, and not every command needs it.
        return CheckpointStore(self.where / layout.CHECKPOINTS, fence(self.where, self._token))

    @cached_property
    def journal(self) -> Journal:
        """The writer of events.jsonl and metrics.jsonl."""
        return Journal(self.folder)

    @cached_property
    def mirror(self) -> Mirror:
        """The copies of its files at the address."""
        return Mirror(self.where, self.folder)

    def push(self) -> None:
        """Copy the files that have changed to the address."""
        self.mirror.push()

    @contextmanager
    def local_copy(self) -> Iterator["RunDir"]:
        """Yield the run with its files in a local directory, copied from its address. Raises OSError."""
        if self.is_here:
            yield self
            return
        # Do not use `folder`: `fetch` replaces and removes files there, and this run may be training on this
        # machine.
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            copied = RunDir(self.where, folder=Path(folder))
            copied.mirror.fetch()
            yield copied

    def files(self) -> RunFiles:
        """Return a new reader, which collects the problems of the files that it reads."""
        return RunFiles(self.folder)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of events.jsonl, after those of the older file if there is one."""
        return read_events(self.folder)

    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json; empty if there is none."""
        return self.files().read(layout.SUMMARY)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Replace summary.json. Raises OSError."""
        write_json_atomic(self.folder / layout.SUMMARY, summary)

    def record_micro_batch(self, samples: int) -> None:
        """Record in config.json the micro-batch size in use. Raises OSError."""
        config = self.files().read(layout.CONFIG)
        if config and config.get("micro_batch_size") != samples:
            write_json_atomic(self.folder / layout.CONFIG, {**config, "micro_batch_size": samples})

    def forget_summary(self) -> None:
        """Remove the summary of an earlier end. Raises OSError."""
        (self.folder / layout.SUMMARY).unlink(missing_ok=True)

    def rank_log(self, rank: int) -> Path:
        return self.logs / layout.rank_log(rank)

    def node_log(self, node: int) -> Path:
        return self.logs / layout.node_log(node)

    def make_private(self) -> None:
        """Create the directory with mode 700 if it is missing. Errors are left to the code that writes there.

        Its files need no special modes, because no other user can enter the directory.
        """
        if self.is_here:
            with suppress(OSError):
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700)

    @contextmanager
    def created(self, is_first: bool = True) -> Iterator[None]:
        """Call `make_private`; at the end, the first node removes empty directories that it created."""
        # List them before anything is created, so that the user's empty directories stay.
        made = [each for each in (self.folder, *self.folder.parents) if is_first and not exists(each)]
        self.make_private()
        try:
            yield
        finally:
            with suppress(OSError):  # not empty, or removed together with the lease on it
                for each in made:
                    if exists(each):
                        each.rmdir()

    def make_folder(self) -> None:
        """Create `folder`. Raises OSError.

        Below the temporary directory, it must belong to this user, so that no other user can plant files.
        """
        top = _temporary()
        if self.folder.is_relative_to(top):
            top.mkdir(mode=0o700, exist_ok=True)
            # mkdir with exist_ok accepts a link to a directory, which another user may have planted in /tmp.
            if top.is_symlink() or top.stat().st_uid != os.getuid():
                raise PermissionError(f"{top} belongs to another user; remove it or set TMPDIR")
        self.folder.mkdir(parents=True, exist_ok=True)

    def make_logs(self) -> bool:
        """Create the log directory for simulated nodes; return whether it is new. Raises ConfigError."""
        is_new = not exists(self.logs)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        return is_new

    def discard_logs_of_refused_launch(self) -> None:
        """Remove the logs of a launch that found only a configuration error, which the terminal has shown.

        Without config.json there was no run.
        """
        if not exists(self.folder / layout.CONFIG):
            shutil.rmtree(self.logs, ignore_errors=True)


def unwritable(where: PurePath, error: OSError) -> ConfigError:
    reason = error.strerror or error
    if isinstance(error, FileExistsError) and os.path.islink(where):
        reason = "it is a link to nothing"
    return ConfigError(f"cannot write to the run directory {where}: {reason}; give another --run-dir")


def _temporary(where: PurePath | None = None) -> Path:
    """Return this user's directory for runs at addresses, or that of the run at `where` in it."""
    return Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}", *(where.parts[1:] if where else ()))
