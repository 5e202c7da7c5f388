"""What is kept of a run while it trains: checkpoints on the volume, snapshots in the node's memory."""

import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.snapshot import OF, PER_RANK, Snapshots
from tandem.checkpoint.writer import FAILURES_ALLOWED, CheckpointWriter, Later
from tandem.config.slices import CheckpointConfig
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.telemetry.recorder import Recorder
from tandem.training.summary import Facts, manifest_info

log = logging.getLogger("tandem.saving")


class Learning(Protocol):
    """What is saved: a task's `Learner`, or what a loop of the user's own keeps."""

    def rank_zeros(self, state: Mapping[str, Any]) -> frozenset[int]:
        """Which tensors of the flattened state, as `whole` gave it, rank 0 alone is sure to have right."""
        ...

    def whole(self) -> dict[str, Any]:
        """The state by part, "model" first; tensors are whole on rank 0, and all ranks call this."""
        ...

    def beside(self, recorder: Recorder, step: int) -> dict[str, Any]:
        """Further parts that only a checkpoint has; whole on rank 0, and all ranks call this."""
        ...

    @property
    def keeps_own(self) -> bool:
        """Whether each rank has something of its own."""
        ...

    def own(self) -> dict[str, Any]:
        """What this rank has of its own, by name. Exchanges nothing."""
        ...


class Saver:
    """Saves when it is told; leaving its `with` block waits for what is still being written.

    `kept_slot` is that of the snapshot that this generation began with, `own_slot` that of the snapshot of
    what is this rank's own.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        facts: Facts,
        learner: Learning,
        recorder: Recorder,
        kept_slot: int | None,
        own_slot: int | None = None,
    ) -> None:
        self._facts, self._learner, self._recorder = facts, learner, recorder
        self._keep_best = config.keep_best
        self.is_end = False
        """Whether the task ends the run at the step that is saved next."""
        self._is_cut_off = False
        self._writer = CheckpointWriter(
            facts.directory.checkpoints,
            Retention.of(config),
            FAILURES_ALLOWED,
            recorder.saved,
            recorder.verified,
            facts.directory.push,
        )
        position = facts.world.position
        shared = position.shared_memories if position.node_rank == 0 else ()
        self._begun: int | None = None
        self._scores = Later()
        self._snapshots = Snapshots(shared, position.local_rank, kept_slot) if shared else None
        own = position.own_memories if learner.keeps_own else ()
        self._own = Snapshots(own, 0, own_slot) if own else None

    def save(self, step: int) -> None:
        """Rank 0 saves, or completes what it has begun; the others help to gather the state."""
        if self._begun != step:
            self.begin(step)
        scores = self._recorder.scores_at(step)
        warn_of_missing_score(self._keep_best, step, scores)
        self._complete(scores or {})

    def begin(self, step: int) -> None:
        """As `save`, but its manifest, without which it does not count, waits for `save`.

        See `CheckpointWriter.save`. Where the run fails before that, `settle` completes it without scores.
        """
        state = {**self._learner.whole(), **self._learner.beside(self._recorder, step)}
        self._begun, self._scores = step, Later()
        if self._facts.world.is_first:
            scores = self._scores
            self._writer.save(
                step,
                {**state, "step": step},
                lambda: manifest_info(self._facts, step, scores.value(), self.is_end, self._is_cut_off),
            )

    def _complete(self, scores: Mapping[str, float]) -> None:
        self._scores.give(scores)
        self._begun = None

    @property
    def begins_snapshots(self) -> bool:
        """Whether the next snapshot here is one that asks for memory first."""
        here = [each for each in (self._snapshots, self._own) if each is not None]
        return any(not each.is_laid_out for each in here)

    def snapshot(self, step: int) -> None:
        """This rank's part of a snapshot on the first node, and on every node what is its own."""
        try:
            if self._own is not None:
                of = [self._facts.world.rank, self._facts.world.size]
                self._own.take(step, {PER_RANK: self._learner.own(), OF: of}, ())
            if self._snapshots is not None:
                state = self._learner.whole()
                self._snapshots.take(step, {**state, "step": step}, self._learner.rank_zeros(state))
        except OSError as error:
            log.warning("in-memory snapshots are disabled, a restart resumes from a checkpoint: %s", error)
            self._snapshots = self._own = None

    @property
    def last_step(self) -> int | None:
        """The newest step that this generation has saved."""
        return self._writer.last_step

    def kept(self, step: int, finished: bool) -> bool:
        """Whether the run may end at `step`: saved, or finished with no failure that is still unmended."""
        return self.last_step == step or (finished and self._writer.failures_in_a_row == 0)

    def settle(self) -> None:
        """Wait for a save on its way, where the run has failed: whatever becomes of it.

        One that waits for its scores counts without them; who resumes from it makes up for the evaluation.
        """
        self._is_cut_off = self._begun is not None
        self._complete({})
        self._writer.settle()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._writer.wait()
        else:
            self.settle()


def snapshot_every(text: str, world: ProcessGroup, strategy: Strategy) -> str:
    """`--snapshot-every auto`: every step where that is a copy within memory, every 5 s from a GPU."""
    # Where ranks hold shares, no node has the whole state: a checkpoint is the resume point.
    if strategy.shares_state or not world.position.memories:
        return "never"
    return text if text != "auto" else "1" if world.device.type == "cpu" else "5s"


def warn_of_missing_score(keep_best: str | None, step: int, scores: Mapping[str, float]) -> None:
    """A name that no evaluation gives is a typo, and shows at the first evaluation only."""
    if keep_best and scores and keep_best.partition(":")[0] not in scores:
        there = ", ".join(sorted(scores))
        log.warning("--keep-best %s: the evaluation at step %d returned only %s", keep_best, step, there)


def warn_of_unsaved_scores(config: CheckpointConfig, eval_every: str) -> None:
    """For rank 0 where checkpoints and evaluations do not meet (see `Timetable.saves_every_evaluation`)."""
    if config.keep_best:
        log.warning(
            "--keep-best %s: only a checkpoint saved at the step of an evaluation can be the best, but "
            "--checkpoint-every %s misses some evaluations of --eval-every %s",
            config.keep_best,
            config.checkpoint_every,
            eval_every,
        )
