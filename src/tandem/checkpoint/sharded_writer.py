"""Save a sharded state: each rank writes its own file, and rank 0 publishes all of them together.

The writer threads of the ranks coordinate through a store, because only the training thread may run
collectives. Rank 0 announces where to write, the other ranks report their files, and rank 0 announces the
outcome. If a rank is killed, the checkpoint either has all files or does not exist.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol

from torch import Tensor

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.sharded import SHARD, VALUES, Parts, divided, file_name, write_parts
from tandem.checkpoint.storage.protocol import STATE
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter, Rebuild, SaveOutcome, save_to
from tandem.errors import CheckpointError
from tandem.timeouts import SHARDS_POLL_SECONDS

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
