"""Checkpoints as files that cannot lie: whole and hashed, or not there at all. Imports no torch.

    checkpoints/step-000000500/state.pt        the state, as the caller serialised it
    checkpoints/step-000000500/manifest.json   size and SHA-256 of every file, of itself too; and `info`
    checkpoints/.tmp-...                       being written, or left by a killed writer; never read
    checkpoints/.replaced-step-000000500       the old one while a second save of its step is renamed in
    checkpoints/corrupt-step-000000500-1       its bytes were not those written; kept for a look

One process writes to a directory at a time (rank 0); any number may read.
"""

import errno
import hashlib
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoint.files import (
    MANIFEST,
    STATE,
    FsyncError,
    Payload,
    check,
    content,
    fsync_directory,
    make_directory,
    parse_manifest,
    read_or_corrupt,
    remove_tree,
    rename,
    render_manifest,
    size_and_sha256,
    translated,
    unstale,
    write_file,
)
from tandem.checkpoint.retention import Retention, Scores, why_kept
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError

STEP_NAME = re.compile(r"step-(\d{9,})")
T = TypeVar("T")
OnCorrupt = Callable[[int, str], None]  # step, problem


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint: its step, directory, size of all files and the seconds that it took."""

    step: int
    path: Path
    bytes: int
    seconds: float


class CheckpointStore:
    """The checkpoints of one run, in `directory` (made by the first save)."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._anchored = False  # the names of the directory and of those above it are on disk
        self._scores: dict[int, Scores] = {}

    def path(self, step: int) -> Path:
        return self.directory / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Committed steps (those with a manifest), newest first; says nothing of their bytes."""
        with translated(f"cannot list the checkpoints in {self.directory}"):
            return unstale(self._list)

    def without_manifest(self) -> list[int]:
        """Steps whose manifest is gone, newest first: damage, as a directory gets its name with all in it."""
        with translated(f"cannot list the checkpoints in {self.directory}"):
            return unstale(lambda: self._list(committed=False))

    def _list(self, committed: bool = True) -> list[int]:
        names = os.listdir(self.directory) if self.directory.is_dir() else []
        steps = {int(match[1]) for match in map(STEP_NAME.fullmatch, names) if match}
        found = (step for step in steps if (self.path(step) / MANIFEST).exists() == committed)
        return sorted(found, reverse=True)

    def is_there(self, step: int) -> bool:
        with translated(f"cannot look at {self.path(step)}"):
            return unstale(self.path(step).exists)

    def save(self, step: int, payload: Payload, info: dict[str, Any]) -> SaveResult:
        """Write one checkpoint; when this returns, it is whole and on disk under its name.

        `payload` is the state's bytes, or a function that writes them to the sink it is given and that
        can be called twice: after an fsync error the kernel may have dropped the pages it could not write
        and call the next fsync a success, so everything is written anew, once, to new files. The same
        after a stale NFS handle. Scores in `info["eval"]` are those of the weights of this step.
        Raises CheckpointError (full, read-only or failing volume); older checkpoints are as they were.
        """
        begin = time.monotonic()
        free = "free space or mend the volume there; older checkpoints are untouched"
        with translated(f"cannot write checkpoint step {step} in {self.directory}", free):
            unstale(self._prepare)
            try:
                size = self._write(step, payload, info)
            except OSError as error:
                if not isinstance(error, FsyncError) and error.errno != errno.ESTALE:
                    raise
                size = self._write(step, payload, info)
        self._scores.pop(step, None)
        return SaveResult(step, self.path(step), size, time.monotonic() - begin)

    def _prepare(self) -> None:
        if not self._anchored or not self.directory.is_dir():
            make_directory(self.directory)
            self._anchored = True
        self._restore_replaced()
        self._sweep(".tmp-*")

    def _sweep(self, pattern: str) -> None:
        leftovers = list(self.directory.glob(pattern))
        if leftovers:  # their new names first: half removed under the old ones they would look damaged
            fsync_directory(self.directory)
        for leftover in leftovers:
            remove_tree(leftover)

    def _write(self, step: int, payload: Payload, info: dict[str, Any]) -> int:
        temporary = self.directory / f".tmp-{self.path(step).name}-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.mkdir(temporary)
            state = write_file(temporary / STATE, payload)
            manifest = write_file(temporary / MANIFEST, render_manifest(step, {STATE: state.entry()}, info))
            fsync_directory(temporary)
        except BaseException:
            remove_tree(temporary)
            raise
        self._publish(temporary, self.path(step))
        return state.bytes + manifest.bytes

    def _publish(self, temporary: Path, target: Path) -> None:
        replaced = self.directory / f".replaced-{target.name}"
        try:
            if target.exists():
                rename(target, replaced)
                fsync_directory(self.directory)  # or else a power loss may keep the next rename alone
            rename(temporary, target)
            fsync_directory(self.directory)
        except BaseException:  # not known to be on disk: as if it had never been
            with suppress(OSError):  # what this cannot put back, the next save's _prepare does
                if target.exists() and not temporary.exists():
                    os.rename(target, temporary)
                if replaced.exists():
                    os.rename(replaced, target)
                fsync_directory(self.directory)
                remove_tree(temporary)
            raise
        remove_tree(replaced)

    def _restore_replaced(self) -> None:
        """Finish or undo a second save of one step that was killed between its two renames."""
        for replaced in self.directory.glob(".replaced-step-*"):
            target = self.directory / replaced.name.removeprefix(".replaced-")
            if (target / MANIFEST).exists():
                fsync_directory(self.directory)  # the new one's name is on disk before the old one goes
                remove_tree(replaced)
            else:
                rename(replaced, target)

    def why_kept(self, rule: Retention) -> dict[int, list[str]]:
        """The steps that `rule` keeps, newest first, with the reasons. Raises CheckpointError."""
        return why_kept({step: self.scores(step) if rule.best else {} for step in self.steps()}, rule)

    def scores(self, step: int) -> Scores:
        """What the evaluation at `step` gave, from its manifest; nothing where that is damaged."""
        if step not in self._scores:
            try:
                found = self.info(step).get("eval", {})
            except CorruptCheckpointError:
                found = {}
            self._scores[step] = {k: v for k, v in found.items() if isinstance(v, int | float)}
        return self._scores[step]

    def prune(self, rule: Retention, dry_run: bool = False) -> list[int]:
        """Remove what `rule` does not keep, oldest first; returns the steps removed (or that would be).

        The newest always stays. It is read back first: if it is not what was written, nothing is removed
        and CorruptCheckpointError is raised.
        """
        kept = self.why_kept(rule)
        doomed = sorted(set(self.steps()) - set(kept))
        if dry_run or not kept:
            return doomed
        if doomed:
            self.verify(max(kept))
        with translated(f"cannot remove old checkpoints in {self.directory}"):
            unstale(lambda: self._remove(doomed))
        return doomed

    def _remove(self, doomed: list[int]) -> None:
        fsync_directory(self.directory)  # the newest's name is on disk before an older one goes
        for step in doomed:  # renamed first: half removed, it must not look like a damaged one
            with suppress(FileNotFoundError):  # somebody else has just pruned it
                rename(self.path(step), self.directory / f".tmp-pruned-{step}-{secrets.token_hex(4)}")
            self._scores.pop(step, None)
        self._sweep(".tmp-pruned-*")  # what a killed prune left, too

    def quarantine(self, step: int) -> Path:
        """Rename a damaged checkpoint so that nobody takes it for a good one; returns its new path."""
        with translated(f"cannot quarantine {self.path(step)}"):
            number = 1
            while (target := self.directory / f"corrupt-{self.path(step).name}-{number}").exists():
                number += 1
            rename(self.path(step), target)
            fsync_directory(self.directory)
        return target

    def move_aside(self, after_step: int = -1) -> Path | None:
        """Move the checkpoints newer than `after_step` (all by default, and what else lies there) to a
        sibling checkpoints-before-<UTC time>, which is returned; None when there are none to move."""
        newer = [step for step in self.steps() if step > after_step]
        with translated(f"cannot move the checkpoints in {self.directory} aside"):
            everything = after_step < 0 and self.directory.is_dir() and any(self.directory.iterdir())
            if not newer and not everything:
                return None
            name = time.strftime("checkpoints-before-%Y%m%dT%H%M%SZ", time.gmtime())
            aside, number = self.directory.with_name(name), 1
            while aside.exists():
                aside, number = aside.with_name(f"{name}-{number + 1}"), number + 1
            if everything:
                rename(self.directory, aside)
                self._anchored = False
                fsync_directory(self.directory.parent)
                return aside
            make_directory(aside)
            for step in newer:  # newest first: killed half-way, the rest is still one line of training
                rename(self.path(step), aside / self.path(step).name)
            fsync_directory(aside)
            fsync_directory(self.directory)
        return aside

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest: step, written_at (Unix seconds), files, info. Raises CorruptCheckpointError."""
        path = self.path(step) / MANIFEST
        if (manifest := parse_manifest(path, read_or_corrupt(path, content)))["step"] != step:
            raise CorruptCheckpointError(f"{path} is of step {manifest['step']}, its directory of {step}")
        return manifest

    def info(self, step: int) -> dict[str, Any]:
        return dict(self.manifest(step)["info"])

    def size_bytes(self, step: int) -> int:
        with translated(f"cannot size {self.path(step)}"):
            return sum(file.stat().st_size for file in self.path(step).iterdir())

    def verify(self, step: int) -> None:
        """Read every byte back, from the disk where the kernel lets us. Raises CorruptCheckpointError."""
        for name, wanted in self.manifest(step)["files"].items():
            path = self.path(step) / name
            check(path, wanted, *read_or_corrupt(path, size_and_sha256))

    def read(self, step: int) -> tuple[bytes, dict[str, Any]]:
        """The state's bytes, hashed before they are returned, and info. Raises CorruptCheckpointError."""
        manifest = self.manifest(step)
        path = self.path(step) / STATE
        state = read_or_corrupt(path, content)
        check(path, manifest["files"][STATE], len(state), hashlib.sha256(state).hexdigest())
        return state, manifest["info"]

    def newest_valid(self, on_corrupt: OnCorrupt) -> tuple[int, bytes, dict[str, Any]] | None:
        """(step, state, info) of the newest checkpoint whose hashes hold; damaged ones are quarantined."""
        found = self.newest(self.read, on_corrupt)
        return None if found is None else (found[0], *found[1])

    def newest(
        self, read: Callable[[int], T], on_corrupt: OnCorrupt, quarantine: bool = True
    ) -> tuple[int, T] | None:
        """(step, what `read` makes of it) of the newest that `read` does not call a CorruptCheckpointError.

        `on_corrupt(step, problem)` is called for each that is passed over. An unreadable volume raises
        CheckpointError: to go on from an older checkpoint because of a passing error would throw training
        away.
        """
        if quarantine:
            with translated(f"cannot mend {self.directory}"):
                unstale(self._restore_replaced)
        for step in self.steps():
            try:
                return step, read(step)
            except CorruptCheckpointError as error:
                problem = str(error)
            if not self.is_there(step):  # pruned by a writer, which has a newer one: look anew
                return self.newest(read, on_corrupt, quarantine)
            on_corrupt(step, problem + (self._set_aside(step) if quarantine else ""))
        return None

    def _set_aside(self, step: int) -> str:
        """What became of it, for a log line: a read-only volume is no reason not to use the next older."""
        try:
            return f"; quarantined as {self.quarantine(step).name}"
        except CheckpointError as error:
            return f"; {error}, so it stays where it is"


def locate(text: str) -> tuple[CheckpointStore, int | None]:
    """PATH[@STEP] -> the store and the step (None: the newest); PATH is a run, its checkpoints, or one step.

    Raises ConfigError where there is no such checkpoint.
    """
    name, at, number = text.rpartition("@")
    step = int(number) if at and number.isdecimal() and not Path(text).exists() else None
    path = Path(text if step is None else name)
    if not os.path.isdir(path):
        raise ConfigError(f"{path} is no directory; give a run, its checkpoints, or one step-... of them")
    if step is None and (match := STEP_NAME.fullmatch(path.resolve().name)):
        path, step = path.resolve().parent, int(match[1])
    store = CheckpointStore(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{store.directory} holds no checkpoint; give a run that has saved one")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        raise ConfigError(f"{store.directory} has no checkpoint of step {step}; it has {there}")
    return store, step
