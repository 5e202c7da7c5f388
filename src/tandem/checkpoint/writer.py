"""Save asynchronously: a step waits only for a copy in memory, which a thread writes.

A failed save never ends training; too many failed saves in a row do. With sharded parameters, each rank
writes its own file, and rank 0 publishes all of them together.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from tandem.checkpoint.pinned import Pinned, contiguous_copies, streams_of
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.sharded import SHARD, VALUES, Parts, divided, file_name, write_parts
from tandem.checkpoint.state import flatten, unflatten
from tandem.checkpoint.storage.protocol import STATE, Sink
from tandem.checkpoint.store import CheckpointStore, Info
from tandem.errors import CheckpointError, RunTakenError
from tandem.telemetry.meter import SaveOutcome as SaveOutcome
from tandem.timeouts import SAVE_AGAIN_SECONDS, SHARDS_POLL_SECONDS
from tandem.torch_private import copy_all

log = logging.getLogger("tandem.checkpoint")

Key = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]
Rebuild = Callable[[list[Tensor]], dict[Any, Any]]


class Buffers:
    """Reusable copies of a state's tensors: allocated once, overwritten by every save (pinned for GPUs)."""

    def __init__(self) -> None:
        self._copies: list[Tensor] = []
        self._forms: list[tuple[torch.dtype, torch.Size]] = []
        self._pinned = Pinned()
        self._memory = torch.empty(0)

    def copy(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copy the tensors into this object's memory, valid until the next call; tied tensors stay tied."""
        keys = [_key(tensor) for tensor in tensors]
        distinct: dict[Key, Tensor] = {}
        for key, tensor in zip(keys, tensors, strict=True):
            # torch.save stores tied tensors once only if they share memory in the copy too.
            distinct.setdefault(key, tensor)
        sources = list(distinct.values())
        forms = [(dtype, shape) for _, dtype, shape, _ in distinct]
        if forms != self._forms:
            self._forms = []  # in case there is no memory for them
            self._allocate(sources, on_gpu=any(source.is_cuda for source in sources))
            self._forms = forms
        if sources:
            copy_all(self._copies, sources, non_blocking=True)
        # The copies are asynchronous; the next step would overwrite parameters that are still being read.
        for stream in streams_of(sources):
            stream.synchronize()
        copies = dict(zip(distinct, self._copies, strict=True))
        return [copies[key] for key in keys]

    def _allocate(self, sources: list[Tensor], on_gpu: bool) -> None:
        self._pinned.release()
        if not on_gpu:
            self._copies = [torch.empty(source.shape, dtype=source.dtype) for source in sources]
            return
        self._memory, self._copies = contiguous_copies(sources)
        self._pinned.hold(self._memory)


def _key(tensor: Tensor) -> Key:
    """Return a key for a tensor's values. Empty tensors have address 0, so their id is the key."""
    return tensor.data_ptr() or id(tensor), tensor.dtype, tensor.shape, tensor.stride()


def save_to(state: Mapping[Any, Any], sink: Sink) -> None:
    """Write a plain state as `serialize` does."""
    torch.save(state, cast(IO[bytes], sink))


FAILURES_ALLOWED = 3
"""How many saves in a row may fail before the run ends with an error."""


class CheckpointWriter:
    """Rank 0's writer: saves one state at a time, verifies the newest checkpoint before it prunes older ones.

    The writer thread calls all three functions: `report` after each save, `verified` with each step that was
    read back before older ones were removed, and `before` just before a save is published.
    """

    def __init__(
        self,
        store: CheckpointStore,
        keep: Retention,
        failures_allowed: int,
        report: Callable[[SaveOutcome], None] = lambda outcome: None,
        verified: Callable[[int], None] = lambda step: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._keep = keep
        self._allowed = failures_allowed
        self._report = report
        self._verified = verified
        self._before = before
        self._buffers = Buffers()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._failures_in_a_row = 0
        self._unsaved: tuple[int, dict[Any, Any], Info] | None = None
        self.last_step: int | None = None
        self.problem = ""
        """Why the last save failed; empty if it did not."""

    def save(self, step: int, state: Mapping[str, Any], info: Info) -> None:
        """Begin to save `state` as of `step`; return as soon as its tensors are copied.

        If `info` is a function, it is called once the state is written, and may wait.

        Waits for the previous save if that is still being written. Raises ConfigError for a state that could
        not be loaded again, and CheckpointError if too many saves in a row have failed.
        """
        began = time.monotonic()
        # There is one set of buffers, and the previous save still reads it.
        self.wait()
        tensors, rebuild = self._split_tensors(state)
        copies = self._buffers.copy(tensors)
        held = time.monotonic() - began
        returns = threading.Event()

        def write() -> None:
            returns.wait()  # otherwise it would hold Python's lock, and the caller would wait 5 ms for it
            try:
                copied = rebuild(copies)
            except BaseException as error:
                self._error = error
                return
            self._write(step, copied, info, began, held)

        # The thread is no daemon, so that Python does not exit in the middle of a save.
        self._thread = threading.Thread(target=write, name="tandem-checkpoint")
        self._thread.start()
        returns.set()

    def _split_tensors(self, state: Mapping[str, Any]) -> tuple[list[Tensor], Rebuild]:
        """Return the tensors to copy, and a function that rebuilds the state from the copies.

        Training waits for this call, but not for that function.
        """
        skeleton, tensors = flatten(state)
        return tensors, partial(unflatten, skeleton)

    def wait(self) -> None:
        """Wait until the save has finished; raise its error if it must end the run."""
        self.join_quietly()
        if self._error is not None:
            raise self._error

    def retry_failed_save(self) -> None:
        """Write the last save again if it failed, until it succeeds. Raises as `save`.

        It is for the last step of a run, which has no later save.
        """
        self.wait()
        while self._unsaved is not None:
            time.sleep(SAVE_AGAIN_SECONDS)
            self._write(*self._unsaved, time.monotonic(), 0.0)
            self.wait()

    def hurry(self, seconds: float) -> None:
        """Tell the writer that other ranks may be gone, so it waits at most `seconds` more for them."""

    def join_quietly(self) -> None:
        """Wait until the save has finished, successful or not."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, step: int, state: dict[Any, Any], info: Info, began: float, held: float) -> None:
        waited = 0.0

        def seal() -> dict[str, Any]:
            nonlocal waited
            asked = time.monotonic()
            found = info() if callable(info) else info
            waited += time.monotonic() - asked
            self._before()
            return found

        try:
            size = self._commit(step, state, seal)
            self._failures_in_a_row = 0
            self.last_step = step
            self._unsaved = None
            self.problem = ""
        except CheckpointError as error:
            size = None
            # `retry_failed_save` may need it. It refers to the buffers, so there is no second copy.
            self._unsaved = (step, state, info)
            self.problem = str(error)
            self._failed(step, error)
        # For example RunTakenError. `wait` raises it in the training thread.
        except BaseException as error:
            self._error = error
            return
        # The time that `info` waited, for an evaluation that still runs, is not part of the save.
        self._report(SaveOutcome(step, time.monotonic() - began - waited, held, size))
        if size is not None:
            self._prune(step)

    def _commit(self, step: int, state: dict[Any, Any], seal: Callable[[], dict[str, Any]]) -> int:
        """Write and publish the state; return its bytes. A retry of a save calls this again."""
        return self._store.save(step, lambda sink: save_to(state, sink), seal)

    def _failed(self, step: int, error: CheckpointError) -> None:
        self._failures_in_a_row += 1
        if self._failures_in_a_row > self._allowed:
            self._error = CheckpointError(
                f"{self._failures_in_a_row} saves in a row failed, but only {self._allowed} are "
                f"allowed; last error: {error}"
            )
            return
        log.warning(
            "save at step %d failed (%d in a row, %d allowed): %s",
            step,
            self._failures_in_a_row,
            self._allowed,
            error,
        )

    def _prune(self, newest: int) -> None:
        try:
            if self._store.prune(self._keep):
                self._verified(newest)
        except CheckpointError as error:
            # Surplus checkpoints do no harm until the volume is full, and then the next save fails.
            log.warning("old checkpoints were not deleted: %s", error)
        except RunTakenError as error:
            self._error = error


# Save a sharded state. The writer threads of the ranks coordinate through a store, because only the training
# thread may run collectives. Rank 0 announces where to write, the other ranks report their files, and rank 0
# announces the outcome. If a rank is killed, the checkpoint either has all files or does not exist.

PARTS = "tandem_parts"
"""The key of this rank's shards in the state that the writer writes."""


class ShardNotices(Protocol):
    """A small key-value store through which the writer threads of the ranks coordinate a save."""

    def set(self, key: str, value: object) -> None:
        """Set a JSON value, once per key."""
        ...

    def get_all(self, keys: Sequence[str]) -> list[Any] | None:
        """Return the values of all `keys`, or None if one is missing. Does not wait."""
        ...

    def delete(self, key: str) -> None:
        """Remove a key, if it is there."""
        ...


class ShardedWriter(CheckpointWriter):
    """The writer of one of `ranks` ranks. All ranks save the same steps; only rank 0's `info` is used."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        notices: ShardNotices,
        store: CheckpointStore,
        keep: Retention,
        failures_allowed: int,
        report: Callable[[SaveOutcome], None] = lambda outcome: None,
        verified: Callable[[int], None] = lambda step: None,
        before: Callable[[], None] = lambda: None,
    ) -> None:
        if rank == 0:
            super().__init__(store, keep, failures_allowed, report, verified, before)
        else:
            super().__init__(store, keep, failures_allowed)
        self._rank = rank
        self._ranks = ranks
        self._notices = notices
        self._number = 0  # the number of the attempt, the same on all ranks
        self._hurried = threading.Event()
        self._until = float("inf")

    def _split_tensors(self, state: Mapping[str, Any]) -> tuple[list[Tensor], Rebuild]:
        """Return this rank's shards, too; only rank 0 writes the rest of the state."""
        rest, parts = divided(state)
        tensors, rebuild_rest = super()._split_tensors(rest if self._rank == 0 else {})
        before = len(tensors)
        heads = [(name, part[SHARD]) for name, part in parts.items()]

        def rebuild(copies: list[Tensor]) -> dict[Any, Any]:
            copied = zip(heads, copies[before:], strict=True)
            own = {name: {SHARD: head, VALUES: values} for (name, head), values in copied}
            return {**rebuild_rest(copies[:before]), PARTS: own}

        return [*tensors, *(part[VALUES] for part in parts.values())], rebuild

    def hurry(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._hurried.set()

    def _commit(self, step: int, state: dict[Any, Any], seal: Callable[[], dict[str, Any]]) -> int:
        self._number += 1
        rest = dict(state)
        parts: Parts = rest.pop(PARTS)
        if self._rank:
            return self._follow(parts)
        pending = None
        problem = "rank 0 failed"
        try:
            pending = self._store.begin(step)
            self._notices.set(self._key("begin"), pending.name)
            size = self._lead(step, pending, rest, parts, seal)
            problem = ""
        except CheckpointError as error:
            problem = str(error)
            raise
        finally:
            self._notices.set(self._key("end"), problem)
            if problem and pending is not None:
                self._store.abandon(pending)
        return size

    def _lead(
        self,
        step: int,
        pending: PurePath,
        rest: Mapping[Any, Any],
        parts: Parts,
        seal: Callable[[], dict[str, Any]],
    ) -> int:
        name, entry = self._store.add(pending, STATE, lambda sink: save_to(rest, sink))
        files = {name: entry, **dict([self._write_file(pending, parts)])}
        for rank, (problem, *written) in enumerate(self._wait(self._others()), start=1):
            if problem:
                raise CheckpointError(f"rank {rank}: {problem}")
            files[written[0]] = written[1]
        # Each rank that wrote this time has read how the last attempt ended.
        for key in ("begin", "end", *map(str, range(1, self._ranks))):
            self._notices.delete(self._key(key, self._number - 1))
        return self._store.publish(step, pending, files, seal)

    def _others(self) -> list[str]:
        return [self._key(str(rank)) for rank in range(1, self._ranks)]

    def _follow(self, parts: Parts) -> int:
        """Write this rank's file; return its bytes once rank 0 has published it. Raises CheckpointError."""
        begin, end = self._key("begin"), self._key("end")
        name = self._wait([begin], unless=end)[0]
        size = 0
        if name is not None:
            try:
                written, entry = self._write_file(self._store.pending(name), parts)
                size = int(str(entry["bytes"]))
                self._notices.set(self._key(str(self._rank)), ["", written, entry])
            except CheckpointError as error:
                self._notices.set(self._key(str(self._rank)), [str(error)])
        # A rank that ends has done its part. It must not wait for rank 0, which may wait for it.
        if problem := self._wait([end], is_needed=False)[0]:
            raise CheckpointError(problem)
        return size

    def _write_file(self, pending: PurePath, parts: Parts) -> tuple[str, dict[str, object]]:
        index = dict[str, Any]()
        name, entry = self._store.add(
            pending, file_name(self._rank, self._ranks), lambda sink: index.update(write_parts(parts, sink))
        )
        return name, {**entry, **index}

    def _key(self, what: str, number: int | None = None) -> str:
        return f"{self._number if number is None else number}/{what}"

    def _wait(self, keys: list[str], unless: str | None = None, is_needed: bool = True) -> list[Any]:
        """Return the values of `keys`; [None] if `unless` has one first.

        Raises CheckpointError `seconds` after `hurry`; at once, unless `is_needed`.
        """
        while True:
            found = self._notices.get_all(keys) if keys else []
            if found is not None:
                return found
            if unless is not None and self._notices.get_all([unless]) is not None:
                return [None]
            if time.monotonic() > self._until or (self._hurried.is_set() and not is_needed):
                raise CheckpointError("the other ranks ended before all had written their shards")
            # After `hurry`, the event is set and no longer waits.
            if self._hurried.wait(SHARDS_POLL_SECONDS):
                time.sleep(SHARDS_POLL_SECONDS)

    def _prune(self, newest: int) -> None:
        if self._rank == 0:
            super()._prune(newest)
