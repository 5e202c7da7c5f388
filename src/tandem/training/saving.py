"""Save a run while it trains: checkpoints on the volume, snapshots in the node's memory."""

import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.snapshot import OF, PER_RANK, Snapshots
from tandem.checkpoint.state import flatten
from tandem.checkpoint.writer import FAILURES_ALLOWED, CheckpointWriter, ShardedWriter
from tandem.config.slices import CheckpointConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.group_store import StoreNotices
from tandem.distributed.neighbors import NeighborCopies
from tandem.distributed.peers import is_peer_loss
from tandem.distributed.position import Grant
from tandem.distributed.strategy import Strategy
from tandem.distributed.whole_state import SHARE, Rank0Values
from tandem.errors import StoppedError
from tandem.schedule import Cadence
from tandem.telemetry.recorder import Recorder
from tandem.timeouts import SHARDS_LEFT_SECONDS
from tandem.training.summary import RunInfo, manifest_info

log = logging.getLogger("tandem.saving")

SMALL_COPY_BYTES = 8 * 2**20
"""On CPUs, `--snapshot-every auto` copies up to this size per rank at every step: about 2 ms."""
SHORTEST_SECONDS = {"cpu": 0.0, "cuda": 5.0}
"""Shortest interval of `--snapshot-every auto`.

On GPUs a snapshot costs more than the copy that is measured: the host prepares no step meanwhile, so the GPU
is idle for a moment afterwards.
"""
LONGEST_SECONDS = 60.0
"""Longest interval of `--snapshot-every auto`, even if one copy a minute takes more than its share."""


class CheckpointSource(Protocol):
    """The source of the state: a task's `TrainState`, or what a custom loop keeps."""

    @property
    def has_rank_0_tensors(self) -> bool:
        """Whether the state may have tensors that `rank_0_indices` names; the same on all ranks."""
        ...

    def rank_0_indices(self, state: Mapping[str, Any]) -> frozenset[int]:
        """Return the indices, in the flattened state, of tensors whose values must be taken from rank 0."""
        ...

    def full_state(self) -> dict[str, Any]:
        """Return the state by part, "model" first. Tensors are complete on rank 0. All ranks call this."""
        ...

    def local_state(self) -> dict[str, Any]:
        """Return the same state, but of sharded tensors only this rank's part (`checkpoint/sharded.py`)."""
        ...

    def checkpoint_extras(self, recorder: Recorder, step: int) -> dict[str, Any]:
        """Return further parts for checkpoints only, complete on rank 0. All ranks call this."""
        ...

    @property
    def has_per_rank_state(self) -> bool:
        """Whether the state has values that are meant to differ between ranks."""
        ...

    def per_rank_state(self) -> dict[str, Any]:
        """Return this rank's own values, by name. Exchanges nothing."""
        ...


class Saver:
    """Save on request; leaving the `with` block waits for a save that is still being written.

    `kept_slot` is the slot of this node that has the snapshot with which this generation began, and
    `own_slot` that of the snapshot of this rank's own values. `generation` is the generation's number.
    `has_shards`: no rank has the whole state, so each rank's state is its own. `copies` sends it to the next
    node.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        facts: RunInfo,
        source: CheckpointSource,
        recorder: Recorder,
        grant: Grant,
        kept_slot: int | None,
        own_slot: int | None = None,
        generation: int = 0,
        has_shards: bool = False,
        copies: NeighborCopies | None = None,
    ) -> None:
        self._facts = facts
        self._source = source
        self._recorder = recorder
        self._keep_best = config.keep_best
        self.is_end = False
        """Whether the task ends the run at the step that is saved next."""
        self._is_cut_off = False
        self.on_copied: Callable[[int, float], None] = lambda size, seconds: None
        """Receives the bytes that this rank copied for a snapshot, and the seconds that it took."""
        world = facts.world
        notices = StoreNotices(world.store) if has_shards else None
        make = partial(ShardedWriter, world.rank, world.size, notices) if notices else CheckpointWriter
        self._writer = make(
            facts.directory.checkpoints,
            Retention.of(config),
            FAILURES_ALLOWED,
            recorder.saved,
            recorder.verified,
            facts.directory.push,
        )
        position = facts.world.position
        shared = grant.shared_memories
        self._begun: int | None = None
        self._scores: Future[Mapping[str, float]] = Future()
        """Not known yet when a save begins; its thread waits for them."""
        nodes_here = max(1, position.ranks_on_host // position.local_world_size)
        local_rank = position.local_rank
        shared = () if has_shards else shared
        self._snapshots = Snapshots(shared, local_rank, kept_slot, generation, nodes_here) if shared else None
        own = grant.own_memories(local_rank) if has_shards or source.has_per_rank_state else ()
        self._has_shards = has_shards
        self._copies = copies
        region, held = (None, ()) if copies is None else (grant.copy_memories(local_rank)[0], copies.held)
        here = position.ranks_on_host
        self._own = Snapshots(own, 0, own_slot, generation, here, region, held) if own else None
        # With one node, the rank that has these values writes them.
        self._from_rank_0 = Rank0Values(facts.world) if position.nodes > 1 and not has_shards else None
        self._differs = self._from_rank_0 is not None and source.has_rank_0_tensors

    def save(self, step: int) -> None:
        """Save on rank 0, or complete the save that was begun; other ranks help, or write their shards."""
        if self._begun != step:
            self.begin(step)
        scores = self._recorder.scores_at(step)
        warn_of_missing_score(self._keep_best, step, scores)
        self._complete(scores or {})

    def begin(self, step: int) -> None:
        """Start a save. Its manifest, without which it does not count, waits for `save`.

        See `CheckpointWriter.save`. If the run fails before that, `join_quietly` completes it without scores.
        """
        # Every rank takes part in gathering the state, so this must not be under `if is_first`.
        state = self._source.local_state() if self._has_shards else self._source.full_state()
        state = {**state, **self._source.checkpoint_extras(self._recorder, step)}
        self._begun = step
        self._scores = Future()
        if self.writes:
            # The writer calls the lambda later, when `self._scores` may belong to the next save. That save
            # waits for this one, so the two would wait for each other.
            scores = self._scores
            self._writer.save(
                step,
                {**state, "step": step},
                lambda: manifest_info(self._facts, step, scores.result(), self.is_end, self._is_cut_off),
            )

    def _complete(self, scores: Mapping[str, float]) -> None:
        if not self._scores.done():
            self._scores.set_result(scores)
        self._begun = None

    @property
    def writes(self) -> bool:
        """Whether this rank writes part of a checkpoint."""
        return self._has_shards or self._facts.world.is_first

    @property
    def begins_snapshots(self) -> bool:
        """Whether the next snapshot here must first allocate memory."""
        here = [each for each in (self._snapshots, self._own) if each is not None]
        return any(not each.is_laid_out for each in here)

    @property
    def is_copying(self) -> bool:
        """Whether this rank's last copy to the next node is still in progress."""
        return self._copies is not None and self._copies.is_busy

    def snapshot(self, step: int, has_lines: bool, may_copy: bool = False) -> None:
        """Take this rank's part of the node's snapshot, and one of its own values. All ranks call this.

        `has_lines`: rank 0 has written this step's lines to the journal. `may_copy`: no rank `is_copying`.
        """
        began = time.monotonic()
        if self._has_shards:
            # Do this even without memory, because all ranks may need to take part.
            own = self._source.local_state()
            with self._optional_snapshots(), self._copying(may_copy):
                self._report(self._keep(step, {**own, "step": step}), began)
            return
        if self._snapshots is None and self._own is None and self._from_rank_0 is None:
            return
        state = self._source.full_state()
        rank_0_indices = self._source.rank_0_indices(state)
        skeleton, tensors = flatten({**state, "step": step})
        receives = time.monotonic()
        is_right = self._receive(rank_0_indices, tensors, has_lines)
        began += time.monotonic() - receives  # rank 0's values have a share of the time for themselves
        with self._optional_snapshots():
            only_copied = True
            if self._own is not None:
                only_copied = self._keep(step, {PER_RANK: self._source.per_rank_state()})
            if self._snapshots is not None and is_right:
                only_copied &= self._snapshots.take_flat(step, skeleton, tensors, rank_0_indices)
            self._report(only_copied, began)

    def _keep(self, step: int, own: Mapping[str, Any]) -> bool:
        """Take a snapshot of the values that only this rank has; returns the same as `Snapshots.take`."""
        if self._own is None:
            return False
        of = [self._facts.world.rank, self._facts.world.size]
        return self._own.take(step, {**own, OF: of}, ())

    def _report(self, only_copied: bool, began: float) -> None:
        if only_copied:
            here = [each for each in (self._snapshots, self._own) if each is not None]
            self.on_copied(sum(each.part_bytes for each in here), time.monotonic() - began)

    @contextmanager
    def _copying(self, may_copy: bool) -> Iterator[None]:
        """Let the next node copy the snapshot that is taken in this block."""
        if self._copies is None or self._own is None:
            yield
            return
        if may_copy:
            self._copies.begin(self._own)
        else:
            self._copies.release_if_stuck(self._own)
        yield
        if may_copy:
            self._copies.send(self._own)

    @contextmanager
    def _optional_snapshots(self) -> Iterator[None]:
        """Disable snapshots if there is no memory for them."""
        try:
            yield
        # Snapshots only shorten a restart, so a lack of memory must not end the run.
        except OSError as error:
            log.warning("in-memory snapshots are disabled, a restart resumes from a checkpoint: %s", error)
            self._snapshots = self._own = None
            # Other nodes may still keep snapshots, at a cost that this rank cannot measure.
            self.on_copied(sys.maxsize, math.inf)
            if self._copies is not None:
                self._copies.veto()

    def _receive(self, indices: Collection[int], tensors: list[Tensor], has_lines: bool) -> bool:
        """Replace the tensors at `indices` by rank 0's; return whether this node may keep `tensors` then.

        This does not depend on whether this rank can keep them, because all ranks take part.
        """
        if self._from_rank_0 is None:
            return True
        is_here = self._facts.world.position.node_rank == 0
        shared = sorted(indices)
        if not self._differs:
            # A snapshot on another node must not be newer than the journal, or its lines would be missing
            # after a restart from there. So rank 0 tells the others when it has written them.
            if has_lines:
                self._from_rank_0.send([])
            return is_here or not shared
        if not self._from_rank_0.is_due():
            return is_here
        found = self._from_rank_0.send([tensors[index] for index in shared])
        if found is None:
            return is_here
        for index, tensor in zip(shared, found, strict=True):
            tensors[index] = tensor
        return True

    @property
    def last_step(self) -> int | None:
        """The newest step that this generation has saved."""
        return self._writer.last_step

    def end(self, step: int, finished: bool) -> None:
        """Return once the run may end at `step`.

        A failed save of a finished run is tried again. Raises CheckpointError if it keeps failing, and
        StoppedError if a run that was asked to stop could not be saved.
        """
        if finished:
            self._writer.retry_failed_save()
        elif self.last_step != step:
            raise StoppedError(f"stopped at step {step} without a checkpoint: {self._writer.problem}")

    def join_quietly(self, error: BaseException | None = None) -> None:
        """Wait for a save in progress after the run has failed (with `error`), whatever its outcome.

        A save that waits for its scores is completed without them; a run that resumes from it repeats the
        evaluation.
        """
        self._is_cut_off = self._begun is not None
        self._complete({})
        is_alone = error is not None and is_peer_loss(error, self._facts.world.size)
        self._writer.hurry(0.0 if is_alone else SHARDS_LEFT_SECONDS)
        self._writer.join_quietly()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._copies is not None:
            self._copies.close()
        # An error of a save must not replace the one that ends the run.
        if kind is None:
            self._writer.wait()
        else:
            self.join_quietly(error)


def snapshot_every(text: str, world: ProcessGroup, grant: Grant, strategy: Strategy) -> Cadence:
    """Resolve `--snapshot-every`; `auto` begins with the shortest interval, on CPUs every step.

    It is an interval in seconds even then, so that rank 0 decides for all ranks: each rank measures different
    copies.
    """
    # If each rank remembers its own state of the gradient exchange, no rank has the whole state.
    is_divided = strategy.shards_state and not strategy.shards_parameters
    if is_divided or not grant.memories:
        return Cadence.parse("never")
    return Cadence.parse(text) if text != "auto" else Cadence(SHORTEST_SECONDS[world.device.type], "seconds")


def snapshot_interval(device: str, size: int, seconds: float) -> float:
    """Return the seconds until the snapshot after one of `size` bytes per rank that took `seconds`.

    Each copy is paid for by the interval that follows it, so copies never take more than SHARE of the time,
    however their durations vary, unless LONGEST_SECONDS is too short for one. `device`: "cpu" or "cuda".
    """
    if device == "cpu" and size <= SMALL_COPY_BYTES:
        return 0.0
    return min(max(seconds / SHARE[device], SHORTEST_SECONDS[device]), LONGEST_SECONDS)


def warn_of_missing_score(keep_best: str | None, step: int, scores: Mapping[str, float]) -> None:
    """Warn about a --keep-best name that no evaluation returns: a typo, which only an evaluation reveals."""
    if keep_best and scores and keep_best.partition(":")[0] not in scores:
        there = ", ".join(sorted(scores))
        log.warning("--keep-best %s: the evaluation at step %d returned only %s", keep_best, step, there)


def warn_of_unsaved_scores(config: CheckpointConfig, eval_every: str) -> None:
    """Warn on rank 0 if some evaluations have no checkpoint (see `EventSchedule.saves_every_evaluation`)."""
    if config.keep_best:
        log.warning(
            "--keep-best %s: only a checkpoint saved at the step of an evaluation can be the best, but "
            "--checkpoint-every %s misses some evaluations of --eval-every %s",
            config.keep_best,
            config.checkpoint_every,
            eval_every,
        )
