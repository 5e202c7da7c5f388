"""The checkpoint store: every checkpoint is complete and hashed, or does not exist. Does not import torch.

    checkpoints/step-000000500/state.pt        the state, as serialized by the caller
    checkpoints/step-000000500/manifest.json   size and SHA-256 of every file and of itself; and `info`
    checkpoints/step-000000500/shard-*.bin     with sharded parameters, the part of each rank
    checkpoints/corrupt-step-000000500-1       quarantined: its bytes are not those that were written

Only one process at a time publishes in a directory (rank 0), which `fence` enforces; any number may read. The
storage decides how files are committed, and cleans up after a killed writer.
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
    state_entry,
)
from tandem.checkpoint.retention import Retention, Scores, why_kept
from tandem.checkpoint.storage import storage_at
from tandem.checkpoint.storage.protocol import (
    MANIFEST,
    STEP_NAME,
    Entries,
    Payload,
    StorageReader,
    retry_stale,
)
from tandem.errors import CheckpointError, CorruptCheckpointError, RunTakenError, UnloadableError

T = TypeVar("T")
OnCorrupt = Callable[[int, str], None]  # step, problem
Info = dict[str, Any] | Callable[[], dict[str, Any]]
Sealed = Callable[[Entries], bytes]
ADVICE = "free space or repair the volume; older checkpoints are untouched"


@contextmanager
def translated(what: str, advice: str = "") -> Iterator[None]:
    """Convert an OSError to a CheckpointError with a one-line message."""
    try:
        yield
    except OSError as error:
        # str() of an OSError begins with its number, which helps no reader.
        reason = error.strerror or str(error)
        raise CheckpointError(f"{what}: {reason}" + (f"; {advice}" if advice else "")) from error


class CheckpointStore:
    """The checkpoints of one run, in `directory` (a Path or RemotePath), which the first save creates.

    `fence` raises RunTakenError if the run belongs to another launch (see `run/lease.py`).
    """

    def __init__(self, directory: PurePath, fence: Callable[[], None] = lambda: None) -> None:
        self.directory = directory
        self._storage = storage_at(directory)
        self._fence = fence
        self._ours: set[int] | None = None  # steps that a save may replace
        self._scores: dict[int, Scores] = {}
        self.unloadable: set[int] = set()
        """Steps with correct bytes that this version cannot load.

        They are kept and do not count for retention.
        """

    def path(self, step: int) -> PurePath:
        return self.directory / f"step-{step:09d}"

    def steps(self) -> list[int]:
        """Return the committed steps (those with a manifest), newest first. Does not check their bytes."""
        return [step for step, files in self._list().items() if MANIFEST in files]

    def without_manifest(self) -> list[int]:
        """Return damaged steps that have files but no manifest, newest first.

        Empty for an object store, where an interrupted or running save also looks like this.
        """
        if not self._storage.is_atomic:  # a save was killed, or is still running
            return []
        return [step for step, files in self._list().items() if MANIFEST not in files]

    def all_steps(self) -> list[int]:
        """Return `steps` and `without_manifest`, newest first."""
        return list(self._list()) if self._storage.is_atomic else self.steps()

    def quarantined(self) -> list[str]:
        return sorted(name for name in self._entries() if name.startswith("corrupt-"))

    def _entries(self) -> dict[str, dict[str, int]]:
        with translated(f"cannot list the checkpoints in {self.directory}"):
            return self._storage.list(self.directory)

    def _list(self) -> dict[int, dict[str, int]]:
        """Return {step: {file: bytes}}, newest first."""
        found = self._entries().items()
        steps = {int(match[1]): files for name, files in found if (match := STEP_NAME.fullmatch(name))}
        return dict(sorted(steps.items(), reverse=True))

    def open_for_writing(self) -> None:
        """Treat checkpoints that appear from now on as another writer's, which a save does not replace."""
        self._ours = set(self.steps())

    def save(self, step: int, payload: Payload, info: Info) -> int:
        """Write one checkpoint; once this returns, it is complete and durable. Returns its bytes.

        `payload` is the state's bytes, or a function that writes them to a given sink. `info` is a dict, or a
        function that is called when the payload has been written. Both functions may be called twice. Scores
        in `info["eval"]` must be those of the weights of this step.

        Raises CheckpointError (full, read-only or failing volume; another writer has saved this step) and
        RunTakenError. Older checkpoints are not changed.
        """
        return self._publish(
            step,
            info,
            lambda sealed, replace: self._storage.commit(self.path(step), payload, sealed, replace),
        )

    def begin(self, step: int) -> PurePath:
        """Begin a checkpoint whose files several processes write; return where they `add` them.

        Nothing is visible until `publish`. Raises as `save`.
        """
        with self._writing(step) as ours:
            return self._storage.begin(self.path(step), step in ours)

    def pending(self, name: str) -> PurePath:
        """Return the result of `begin` on another node, given the last part of its path."""
        return self.directory / name

    def add(self, pending: PurePath, name: str, payload: Payload) -> tuple[str, dict[str, object]]:
        """Write a file to `pending`, durably; return (final name, manifest entry). Raises as `save`."""
        with translated(f"cannot write {name} in {pending}", ADVICE):
            return self._storage.add(pending, name, payload)

    def publish(self, step: int, pending: PurePath, files: Entries, info: Info) -> int:
        """Complete a checkpoint with the `files` that were added; see `save`."""
        return self._publish(
            step,
            info,
            lambda sealed, replace: self._storage.publish(pending, self.path(step), files, sealed, replace),
        )

    def abandon(self, pending: PurePath) -> None:
        """Remove the files that were added to `pending`, as far as possible."""
        self._storage.abandon(pending)

    @contextmanager
    def _writing(self, step: int) -> Iterator[set[int]]:
        """Yield the steps that a save may replace; convert errors in the block to CheckpointErrors."""
        with translated(f"cannot write checkpoint step {step} in {self.directory}", ADVICE):
            try:
                if self._ours is None:
                    self.open_for_writing()
                assert self._ours is not None
                yield self._ours
            except FileExistsError as error:
                raise CheckpointError(
                    f"step {step} in {self.directory} was saved by another writer in the meantime; "
                    "let only one run write there, or use another --run-dir"
                ) from error

    def _publish(self, step: int, info: Info, commit: Callable[[Sealed, bool], int]) -> int:
        def sealed(files: Entries) -> bytes:
            # Do this before the fence, because `info` may wait for an evaluation, and the run may be taken
            # meanwhile.
            contents = info() if callable(info) else info
            self._fence()  # the state is written, but nothing is published yet
            return render_manifest(step, files, contents)

        with self._writing(step) as ours:
            size = commit(sealed, step in ours)
            try:
                self._fence()
            except RunTakenError:  # taken over during the commit: the new owner must not resume from it
                self._storage.remove([self.path(step)])
                raise
            ours.add(step)
        self._scores.pop(step, None)
        # This version wrote it, so it can load it and retention counts it again.
        self.unloadable.discard(step)
        return size

    def why_kept(self, rule: Retention) -> dict[int, list[str]]:
        """Return the steps that `rule` keeps, newest first, with the reasons. Raises CheckpointError."""
        steps = [step for step in self.steps() if step not in self.unloadable]
        return why_kept({step: self.scores(step) if rule.best else {} for step in steps}, rule)

    def scores(self, step: int) -> Scores:
        """Return the scores of the evaluation at `step`, from its manifest; empty if that is damaged."""
        if step not in self._scores:
            try:
                found = self.info(step).get("eval", {})
            # Retention must not fail for a damaged manifest; the next resume quarantines it.
            except CorruptCheckpointError:
                found = {}
            self._scores[step] = {k: v for k, v in found.items() if isinstance(v, int | float)}
        return self._scores[step]

    def prune(self, rule: Retention, dry_run: bool = False) -> list[int]:
        """Remove the steps that `rule` does not keep, oldest first; return them, removed or to be removed.

        The newest checkpoint is always kept. It is read back first: if its bytes are wrong, nothing is
        removed and CorruptCheckpointError is raised.
        """
        kept = self.why_kept(rule)
        doomed = sorted(set(self.steps()) - set(kept) - self.unloadable)
        if dry_run or not kept:
            return doomed
        if doomed:
            # The older checkpoints are the only backup if the newest one did not reach the disk.
            self.verify(max(kept))
        with translated(f"cannot remove old checkpoints in {self.directory}"):
            self._fence()
            self._storage.remove([self.path(step) for step in doomed])
            self._storage.repair(self.directory)  # also finish an interrupted prune
        for step in doomed:
            self._scores.pop(step, None)
        return doomed

    def quarantine(self, step: int) -> PurePath:
        """Rename a damaged checkpoint so that it is not used again; return its new path."""
        there = self.quarantined()
        number = 1
        # A step can be damaged more than once, and the earlier evidence is kept.
        while (name := f"corrupt-{self.path(step).name}-{number}") in there:
            number += 1
        with translated(f"cannot quarantine {self.path(step)}"):
            self._fence()
            self._storage.rename(self.path(step), self.directory / name)
        return self.directory / name

    def move_aside(self, after_step: int = -1) -> PurePath | None:
        """Move the checkpoints newer than `after_step` to a sibling directory checkpoints-before-<UTC time>.

        By default, move everything in the directory. Returns the new directory; None if there was nothing to
        move.
        """
        newer = [step for step in self.steps() if step > after_step]
        everything = after_step < 0 and bool(self._entries())
        if not newer and not everything:
            return None
        name = time.strftime(f"{layout.CHECKPOINTS_BEFORE}%Y%m%dT%H%M%SZ", time.gmtime())
        with translated(f"cannot move the checkpoints in {self.directory} aside"):
            aside = self.directory.with_name(name)
            number = 1
            # The name has a resolution of one second.
            while self._storage.list(aside):
                aside = aside.with_name(f"{name}-{number + 1}")
                number = number + 1
            if everything:
                self._storage.rename(self.directory, aside)
            else:  # newest first: after a kill halfway, the rest is still a consistent history
                for step in newer:
                    self._storage.rename(self.path(step), aside / self.path(step).name)
        return aside

    def manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest: step, written_at (Unix seconds), files, info.

        Raises CorruptCheckpointError.
        """
        path = self.path(step) / MANIFEST

        def whole(file: StorageReader) -> bytes:
            # A damaged size must not make a reader allocate that much memory.
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
        """Return {step: bytes of all its files}, newest first, including those of `without_manifest`."""
        return {step: sum(files.values()) for step, files in self._list().items()}

    def verify(self, step: int, from_disk: bool = True) -> None:
        """Re-read every byte, from the disk if the kernel allows it. Raises CorruptCheckpointError."""
        for name, wanted in self.manifest(step)["files"].items():
            path = self.path(step) / name

            def sized(file: StorageReader, path: PurePath = path, wanted: Any = wanted) -> tuple[int, str]:
                # The size is free to check; a truncated file is rejected before any byte is read.
                check_size(path, wanted, file.size)
                return measured(file)

            check(path, wanted, *self._read(path, sized, from_disk))

    def read(self, step: int) -> tuple[bytes, dict[str, Any]]:
        """Return (state, info); the state's hash is verified first. Raises CorruptCheckpointError.

        For a sharded checkpoint, this is the part of the state that is not sharded (see
        `sharded.read_state`).
        """
        manifest = self.manifest(step)
        name, wanted = state_entry(manifest)
        path = self.path(step) / name

        def whole(file: StorageReader) -> bytes:
            check_size(path, wanted, file.size)
            check_fits(path, file.size)
            return file.read(file.size)

        state = self._read(path, whole)
        check(path, wanted, len(state), hashlib.sha256(state).hexdigest())
        return state, manifest["info"]

    def use(self, step: int, name: str, use: Callable[[StorageReader], T]) -> T:
        """Return `use(file)` for a file of a checkpoint; it may be called twice. Raises as `verify`."""
        return self._read(self.path(step) / name, use)

    def _read(self, path: PurePath, use: Callable[[StorageReader], T], from_disk: bool = False) -> T:
        """Return `use(file)`; start again if its NFS handle is stale.

        Raises CorruptCheckpointError for a missing file, and CheckpointError for a failing volume.
        """

        def once() -> T:
            with closing(self._storage.open(path, from_disk)) as file:
                return use(file)

        with translated(f"cannot read {path}"):
            try:
                return retry_stale(once)
            except FileNotFoundError:
                raise CorruptCheckpointError(f"{path} is missing") from None
            except OSError as error:
                if error.errno != errno.EBADMSG:  # a checksum error of the file system or the object store
                    raise
                raise CorruptCheckpointError(f"{path} is damaged: {error.strerror}") from None

    def newest(
        self,
        read: Callable[[int], T],
        on_corrupt: OnCorrupt,
        quarantine: bool = True,
        on_unloadable: OnCorrupt | None = None,
    ) -> tuple[int, T] | None:
        """Return (step, `read(step)`) of the newest checkpoint that `read` does not reject as corrupt.

        A checkpoint is skipped if `read` raises CorruptCheckpointError.

        `on_corrupt(step, problem)` is called for each checkpoint that is skipped. If `read` raises
        UnloadableError, `on_unloadable` is called instead and the checkpoint stays in place; without
        `on_unloadable`, the error is raised. An unreadable volume raises CheckpointError: resuming from an
        older checkpoint because of a temporary error would discard training.
        """
        if quarantine:
            with translated(f"cannot repair {self.directory}"):
                self._storage.repair(self.directory)
        # A checkpoint without a manifest is skipped like any other damaged one: a copy may lack files.
        for step in self.all_steps():
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
            if step not in self.all_steps():  # pruned by a writer, which has a newer one: list again
                return self.newest(read, on_corrupt, quarantine, on_unloadable)
            on_corrupt(step, problem + (self._quarantine_and_describe(step) if quarantine else ""))
        return None

    def _quarantine_and_describe(self, step: int) -> str:
        """Quarantine a checkpoint and return the result for a log message.

        A read-only volume must not prevent the use of the next older checkpoint.
        """
        try:
            return f"; quarantined as {self.quarantine(step).name}"
        except CheckpointError as error:
            return f"; {error}, so it is left in place"
