"""Checkpoints that cannot lie: whole and hashed, or not there at all, wherever they lie. Imports no torch.

    checkpoints/step-000000500/state.pt        the state, as the caller serialised it
    checkpoints/step-000000500/manifest.json   size and SHA-256 of every file, of itself too; and `info`
    checkpoints/corrupt-step-000000500-1       its bytes were not those written; kept for a look

One process writes to a directory at a time (rank 0), which its `fence` sees to; any number may read. How
files get there, and what a killed writer leaves, is the storage's matter.
"""

import errno
import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import PurePath
from typing import Any, TypeVar

from tandem import layout
from tandem.checkpoint.manifest import (
    LARGEST_BYTES,
    check,
    check_fits,
    check_size,
    measured,
    parse_manifest,
    render_manifest,
)
from tandem.checkpoint.retention import Retention, Scores, why_kept
from tandem.checkpoint.storage import storage_at
from tandem.checkpoint.storage.protocol import MANIFEST, STEP_NAME, Entries, Payload, Reader, unstale
from tandem.errors import CheckpointError, CorruptCheckpointError, RunTakenError, UnloadableError

T = TypeVar("T")
OnCorrupt = Callable[[int, str], None]  # step, problem
Info = dict[str, Any] | Callable[[], dict[str, Any]]


@contextmanager
def translated(what: str, advice: str = "") -> Iterator[None]:
    """OSError -> CheckpointError, one line."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what}: {reason}" + (f"; {advice}" if advice else "")) from error


class CheckpointStore:
    """The checkpoints of one run, in `directory` (made by the first save): a Path or a RemotePath.

    `fence` raises RunTakenError once the run belongs to another launch (see `run/owner.py`).
    """

    def __init__(self, directory: PurePath, fence: Callable[[], None] = lambda: None) -> None:
        self.directory, self._storage, self._fence = directory, storage_at(directory), fence
        self._ours: set[int] | None = None  # steps that a save may replace
        self._scores: dict[int, Scores] = {}
        self.unloadable: set[int] = set()
        """Steps whose bytes are right and make no state here; they stay, and are not among those to keep."""

    def path(self, step: int) -> PurePath:
        return self.directory / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Committed steps (those with a manifest), newest first; says nothing of their bytes."""
        return [step for step, files in self._list().items() if MANIFEST in files]

    def without_manifest(self) -> list[int]:
        """Steps with files but no manifest, newest first, where that is damage: nothing else leaves one."""
        if not self._storage.appears_whole:  # a save was killed, or is under way
            return []
        return [step for step, files in self._list().items() if MANIFEST not in files]

    def set_aside(self) -> list[str]:
        """The names of what is quarantined here."""
        return sorted(name for name in self._entries() if name.startswith("corrupt-"))

    def _entries(self) -> dict[str, dict[str, int]]:
        with translated(f"cannot list the checkpoints in {self.directory}"):
            return self._storage.list(self.directory)

    def _list(self) -> dict[int, dict[str, int]]:
        """{step: {file: bytes}}, newest first."""
        found = self._entries().items()
        steps = {int(match[1]): files for name, files in found if (match := STEP_NAME.fullmatch(name))}
        return dict(sorted(steps.items(), reverse=True))

    def open_for_writing(self) -> None:
        """From now on what others save here is another writer's: a save does not replace it."""
        self._ours = set(self.steps())

    def save(self, step: int, payload: Payload, info: Info) -> int:
        """Write one checkpoint; when this returns its bytes, it is whole and there for good under its name.

        `payload` is the state's bytes, or a function that writes them to the sink it is given and that
        can be called twice; so can a function that gives `info`, which is asked when the payload is written.
        Scores in `info["eval"]` are those of the weights of this step.
        Raises CheckpointError (full, read-only or failing volume; another writer has saved this step) and
        RunTakenError; older checkpoints are as they were.
        """
        free = "free space or repair the volume; older checkpoints are untouched"
        with translated(f"cannot write checkpoint step {step} in {self.directory}", free):
            if self._ours is None:
                self.open_for_writing()
            size = self._commit(step, payload, info)
        self._scores.pop(step, None)
        return size

    def _commit(self, step: int, payload: Payload, info: Info) -> int:
        assert self._ours is not None

        def sealed(files: Entries) -> bytes:
            told = info() if callable(info) else info
            self._fence()  # the state is written, nothing of it is published
            return render_manifest(step, files, told)

        try:
            size = self._storage.commit(self.path(step), payload, sealed, step in self._ours)
        except FileExistsError as error:
            raise CheckpointError(
                f"step {step} in {self.directory} was saved by another writer in the meantime; "
                "let only one run write there, or use another --run-dir"
            ) from error
        try:
            self._fence()
        except RunTakenError:  # between the two looks: its new owner must not go on from this one
            self._storage.remove([self.path(step)])
            raise
        self._ours.add(step)
        self.unloadable.discard(step)
        return size

    def why_kept(self, rule: Retention) -> dict[int, list[str]]:
        """The steps that `rule` keeps, newest first, with the reasons. Raises CheckpointError."""
        steps = [step for step in self.steps() if step not in self.unloadable]
        return why_kept({step: self.scores(step) if rule.best else {} for step in steps}, rule)

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
        doomed = sorted(set(self.steps()) - set(kept) - self.unloadable)
        if dry_run or not kept:
            return doomed
        if doomed:
            self.verify(max(kept))
        with translated(f"cannot remove old checkpoints in {self.directory}"):
            self._fence()
            self._storage.remove([self.path(step) for step in doomed])
            self._storage.mend(self.directory)  # what a killed prune left, too
        for step in doomed:
            self._scores.pop(step, None)
        return doomed

    def quarantine(self, step: int) -> PurePath:
        """Rename a damaged checkpoint so that nobody takes it for a good one; returns its new path."""
        there, number = self.set_aside(), 1
        while (name := f"corrupt-{self.path(step).name}-{number}") in there:
            number += 1
        with translated(f"cannot quarantine {self.path(step)}"):
            self._fence()
            self._storage.rename(self.path(step), self.directory / name)
        return self.directory / name

    def move_aside(self, after_step: int = -1) -> PurePath | None:
        """Move the checkpoints newer than `after_step` (all by default, and what else lies there) to a
        sibling checkpoints-before-<UTC time>, which is returned; None when there are none to move."""
        newer = [step for step in self.steps() if step > after_step]
        everything = after_step < 0 and bool(self._entries())
        if not newer and not everything:
            return None
        name = time.strftime(f"{layout.CHECKPOINTS_BEFORE}%Y%m%dT%H%M%SZ", time.gmtime())
        with translated(f"cannot move the checkpoints in {self.directory} aside"):
            aside, number = self.directory.with_name(name), 1
            while self._storage.list(aside):
                aside, number = aside.with_name(f"{name}-{number + 1}"), number + 1
            if everything:
                self._storage.rename(self.directory, aside)
            else:  # newest first: killed half-way, the rest is still one line of training
                for step in newer:
                    self._storage.rename(self.path(step), aside / self.path(step).name)
        return aside

    def manifest(self, step: int) -> dict[str, Any]:
        """The manifest: step, written_at (Unix seconds), files, info. Raises CorruptCheckpointError."""
        path = self.path(step) / MANIFEST

        def whole(file: Reader) -> bytes:
            if file.size > LARGEST_BYTES:
                raise CorruptCheckpointError(f"{path} has {file.size} bytes, too many for a manifest")
            return file.read(file.size)

        if (manifest := parse_manifest(path, self._read(path, whole)))["step"] != step:
            raise CorruptCheckpointError(
                f"{path} is for step {manifest['step']}, its directory for step {step}"
            )
        return manifest

    def info(self, step: int) -> dict[str, Any]:
        return dict(self.manifest(step)["info"])

    def sizes(self) -> dict[int, int]:
        """{step: bytes of all its files}, newest first, with those of `without_manifest`."""
        return {step: sum(files.values()) for step, files in self._list().items()}

    def verify(self, step: int, from_disk: bool = True) -> None:
        """Read every byte back, from the disk where the kernel lets us. Raises CorruptCheckpointError."""
        for name, wanted in self.manifest(step)["files"].items():
            path = self.path(step) / name

            def sized(file: Reader, path: PurePath = path, wanted: Any = wanted) -> tuple[int, str]:
                check_size(path, wanted, file.size)
                return measured(file)

            check(path, wanted, *self._read(path, sized, from_disk))

    def read(self, step: int) -> tuple[bytes, dict[str, Any]]:
        """The state's bytes, hashed before they are returned, and info. Raises CorruptCheckpointError."""
        manifest = self.manifest(step)
        ((name, wanted),) = manifest["files"].items()
        path = self.path(step) / name

        def whole(file: Reader) -> bytes:
            check_size(path, wanted, file.size)
            check_fits(path, file.size)
            return file.read(file.size)

        state = self._read(path, whole)
        check(path, wanted, len(state), hashlib.sha256(state).hexdigest())
        return state, manifest["info"]

    def _read(self, path: PurePath, use: Callable[[Reader], T], from_disk: bool = False) -> T:
        """What `use` makes of a file; begun again where its handle is stale.

        A missing file raises CorruptCheckpointError, a failing volume CheckpointError.
        """

        def once() -> T:
            with closing(self._storage.open(path, from_disk)) as file:
                return use(file)

        with translated(f"cannot read {path}"):
            try:
                return unstale(once)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{path} is missing") from None
            except OSError as error:
                if error.errno != errno.EBADMSG:  # the file system's or the object store's own checksum
                    raise
                raise CorruptCheckpointError(f"{path} is damaged: {error.strerror}") from None

    def newest_valid(self, on_corrupt: OnCorrupt) -> tuple[int, bytes, dict[str, Any]] | None:
        """(step, state, info) of the newest checkpoint whose hashes hold; damaged ones are quarantined."""
        found = self.newest(self.read, on_corrupt)
        return None if found is None else (found[0], *found[1])

    def newest(
        self,
        read: Callable[[int], T],
        on_corrupt: OnCorrupt,
        quarantine: bool = True,
        on_unloadable: OnCorrupt | None = None,
    ) -> tuple[int, T] | None:
        """(step, what `read` makes of it) of the newest that `read` does not call a CorruptCheckpointError.

        `on_corrupt(step, problem)` is called for each that is passed over; `on_unloadable` likewise for one
        that `read` calls an UnloadableError, which stays where it is; without it, that is raised. An
        unreadable volume raises CheckpointError: to resume from an older checkpoint because of a passing
        error would throw training away.
        """
        if quarantine:
            with translated(f"cannot repair {self.directory}"):
                self._storage.mend(self.directory)
        for step in self.steps():
            try:
                return step, read(step)
            except UnloadableError as error:
                if on_unloadable is None:
                    raise
                self.unloadable.add(step)
                on_unloadable(step, str(error))
                continue
            except CorruptCheckpointError as error:
                problem = str(error)
            if step not in self.steps():  # pruned by a writer, which has a newer one: look anew
                return self.newest(read, on_corrupt, quarantine, on_unloadable)
            on_corrupt(step, problem + (self._set_aside(step) if quarantine else ""))
        return None

    def _set_aside(self, step: int) -> str:
        """What became of it, for a log line: a read-only volume is no reason not to use the next older."""
        try:
            return f"; quarantined as {self.quarantine(step).name}"
        except CheckpointError as error:
            return f"; {error}, so it is left in place"
