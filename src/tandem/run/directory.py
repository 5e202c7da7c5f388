"""The run directory, opened once: where it is, its part on this machine, and everything that is kept there.

`layout.py` names its files. Imports no torch: commands that only read open it, too.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any

from tandem import layout
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.config.address import address
from tandem.errors import ConfigError
from tandem.paths import exists
from tandem.platforms.placement import Placement
from tandem.reading import RunFiles
from tandem.run.crash_loop import CrashLoop
from tandem.run.lease import Claim, claim, restarted_as
from tandem.run.mirror import Mirror
from tandem.run.owner import Token, fence
from tandem.telemetry.journal import Journal, read_events, write_json_atomic


class RunDir:
    """A run directory at `where`: a Path, or a RemotePath for s3://BUCKET/PREFIX. Opening it touches no file.

    `folder` is its part on this machine. For a run at an address, that is this user's folder for it in the
    temporary directory, whose files are copied there. `token`: that of the launch that this process belongs
    to, which each checkpoint is checked against; without one, nothing is checked.
    """

    def __init__(self, where: str | PurePath, token: Token | None = None, folder: Path | None = None) -> None:
        """Raises ConfigError for an address that is not valid."""
        self.where = address(where)
        self.folder = folder or (self.where if isinstance(self.where, Path) else _temporary(self.where))
        self.logs = self.folder / layout.LOG
        self._token = token

    @classmethod
    def open(cls, settings: Settings, placement: Placement, now: float) -> "RunDir":
        """That of a launch. The default, with the time in it, is for laptops only. Raises ConfigError."""
        run_dir = settings.run.run_dir
        if run_dir is None:
            if placement.platform != "none":
                raise ConfigError(
                    f"no run directory is set, and on {placement.platform} all nodes need the same one; "
                    "give --run-dir DIR (on the shared volume) or TANDEM_RUN_DIR"
                )
            name = settings.run.task.rpartition(":")[2] if ":" in settings.run.task else settings.run.task
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
            run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}"
        return cls(run_dir.absolute() if isinstance(run_dir, Path) else run_dir)

    @classmethod
    def of(cls, settings: Settings, token: Token | None = None) -> "RunDir":
        """The one that `recorded` has written down: for ranks, which get the settings alone."""
        assert settings.run.run_dir is not None
        return cls(settings.run.run_dir, token)

    def recorded(self, settings: Settings) -> Settings:
        """The settings of a launch here, with absolute paths: for its ranks, config.json and manifests."""
        return settings.replace(run_dir=self.where, data_dir=settings.data.data_dir.absolute())

    @property
    def is_here(self) -> bool:
        """Whether it is a folder, and not at an address."""
        return isinstance(self.where, Path)

    @cached_property
    def checkpoints(self) -> CheckpointStore:
        """Raises ConfigError where the library for an address is missing."""
        return CheckpointStore(self.where / layout.CHECKPOINTS, fence(self.where, self._token))

    @cached_property
    def journal(self) -> Journal:
        """Appends to events.jsonl and metrics.jsonl."""
        return Journal(self.folder)

    @cached_property
    def mirror(self) -> Mirror:
        """Copies files to the address."""
        return Mirror(self.where, self.folder)

    def push(self) -> None:
        """Copy what has changed to the address."""
        self.mirror.push()

    @contextmanager
    def at_hand(self) -> Iterator["RunDir"]:
        """The same with the files from its address in a folder of their own, to read. Raises OSError."""
        if self.is_here:
            yield self
            return
        with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
            copied = RunDir(self.where, folder=Path(folder))
            copied.mirror.fetch()
            yield copied

    def files(self) -> RunFiles:
        """A new reader, which collects what is wrong with the files that it reads."""
        return RunFiles(self.folder)

    def events(self) -> Iterator[dict[str, Any]]:
        """The lines of events.jsonl, after those of the older file where there is one."""
        return read_events(self.folder)

    def summary(self) -> dict[str, Any]:
        """How the run ended; empty where nobody has said it."""
        return self.files().read(layout.SUMMARY)

    def write_summary(self, summary: Mapping[str, object]) -> None:
        """Raises OSError."""
        write_json_atomic(self.folder / layout.SUMMARY, summary)

    def forget_summary(self) -> None:
        """That of an earlier end counts no more. Raises OSError."""
        (self.folder / layout.SUMMARY).unlink(missing_ok=True)

    def rank_log(self, rank: int) -> Path:
        return self.logs / layout.rank_log(rank)

    def node_log(self, node: int) -> Path:
        return self.logs / layout.node_log(node)

    def make_private(self) -> None:
        """Make it with mode 700 where it is missing; what cannot be is said by who writes there.

        Its files need no modes of their own, because no other user gets there.
        """
        if self.is_here:
            with suppress(OSError):
                self.folder.parent.mkdir(parents=True, exist_ok=True)
                self.folder.mkdir(mode=0o700)

    @contextmanager
    def made(self, is_first: bool = True) -> Iterator[None]:
        """`make_private`; the first node takes folders away that it has made and nothing has come into."""
        made = [each for each in (self.folder, *self.folder.parents) if is_first and not exists(each)]
        self.make_private()
        try:
            yield
        finally:
            with suppress(OSError):  # not empty, or gone with the claim on it
                for each in made:
                    if exists(each):
                        each.rmdir()

    def make_folder(self) -> None:
        """Make `folder`; one in the temporary directory is this user's alone. Raises OSError."""
        top = _temporary()
        if self.folder.is_relative_to(top):
            top.mkdir(mode=0o700, exist_ok=True)
            if top.is_symlink() or top.stat().st_uid != os.getuid():
                raise PermissionError(f"{top} belongs to another user; remove it or set TMPDIR")
        self.folder.mkdir(parents=True, exist_ok=True)

    def make_logs(self) -> bool:
        """Make `logs` for nodes that write there, all on this host; whether it is new. Raises ConfigError."""
        is_new = not exists(self.logs)
        try:
            self.logs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        return is_new

    def forget_mistake(self) -> None:
        """Nodes found a mistake, each in its log, and said it on the terminal: no run, no logs of one."""
        if not exists(self.folder / layout.CONFIG):
            shutil.rmtree(self.logs, ignore_errors=True)

    @contextmanager
    def lease(self, placement: Placement, should_stop: Callable[[], bool] = lambda: False) -> Iterator[Claim]:
        """It is this launch's alone meanwhile. Raises ConfigError where it is another's."""
        with closing(claim(self.where, restarted_as(placement), should_stop)) as mine:
            yield mine

    def crash_loop(self, is_ours: Callable[[], bool] = lambda: True) -> CrashLoop:
        """Counts this start; `is_ours` is asked before a write."""
        return CrashLoop(self.where, self.folder, self.checkpoints, is_ours)


def unwritable(where: PurePath, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"cannot write to the run directory {where}: {reason}; give another --run-dir")


def _temporary(where: PurePath | None = None) -> Path:
    """This user's folder for runs at addresses, or the one for the run at `where` in it."""
    return Path(tempfile.gettempdir(), f"tandem-runs-{os.getuid()}", *(where.parts[1:] if where else ()))
