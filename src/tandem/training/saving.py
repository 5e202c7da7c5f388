"""What is kept of a run while it trains: checkpoints on the volume, snapshots in the node's memory."""

import logging
from types import TracebackType

from torch import nn

from tandem.checkpoint.flatten import flatten
from tandem.checkpoint.retention import Retention
from tandem.checkpoint.snapshot import Snapshots
from tandem.checkpoint.storage.copies import Copies
from tandem.checkpoint.store import CheckpointStore
from tandem.checkpoint.writer import CheckpointWriter
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.schedule import Cadence
from tandem.telemetry.recorder import Recorder
from tandem.training.state import TrainingState
from tandem.training.summary import Facts, manifest_info

log = logging.getLogger("tandem.saving")


class Saver:
    """Saves when it is told; leaving its `with` block waits for what is still being written.

    `own`: the tensors of the state (by order of appearance) of which only rank 0 has the values that count.
    `kept_slot` is that of the snapshot that this generation began with.
    """

    def __init__(
        self,
        facts: Facts,
        store: CheckpointStore,
        state: TrainingState,
        recorder: Recorder,
        own: frozenset[int],
        kept_slot: int | None,
    ) -> None:
        self._facts, self._state, self._recorder, self._own = facts, state, recorder, own
        config = facts.settings.checkpoint
        self._writer = CheckpointWriter(
            store,
            Retention.of(config),
            config.checkpoint_failures_allowed,
            recorder.saved,
            recorder.verified,
            Copies(str(facts.settings.run.run_dir)).push,
        )
        position = facts.world.position
        on_first_node = position.node_rank == 0 and bool(position.memories)
        self._snapshots = (
            Snapshots(position.memories, position.local_rank, kept_slot) if on_first_node else None
        )

    def save(self, step: int) -> None:
        """Rank 0 begins to save, see `CheckpointWriter.save`; the others help to gather the state."""
        state = self._state.whole()
        if self._facts.world.is_first:
            info = manifest_info(self._facts, step, self._recorder.scores_at(step))
            self._writer.save(step, {**state, "step": step}, info)

    def snapshot(self, step: int) -> None:
        """This rank's part of a snapshot on the first node; nothing elsewhere."""
        if self._snapshots is None:
            return
        try:
            self._snapshots.take(step, {**self._state.whole(), "step": step}, self._own)
        except (ValueError, OSError) as error:
            log.warning("no more snapshots in memory, a restart goes back to a checkpoint: %s", error)
            self._snapshots = None

    @property
    def last_step(self) -> int | None:
        """The newest step that this world has saved."""
        return self._writer.last_step

    def kept(self, step: int, finished: bool) -> bool:
        """Whether the run may end at `step`: saved, or finished with no failure that is still unmended."""
        return self.last_step == step or (finished and self._writer.failures_in_a_row == 0)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._writer.wait()
        else:
            self._writer.settle()


def rank_zeros(model: nn.Module) -> frozenset[int]:
    """Which tensors of a flattened `model.state_dict()` are buffers: ranks differ in running statistics."""
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    own: set[int] = set()
    index = 0
    for name, value in model.state_dict().items():
        count = len(flatten({name: value})[1])
        if name not in parameters:
            own.update(range(index, index + count))
        index += count
    return frozenset(own)


def snapshot_cadence(text: str, world: ProcessGroup, strategy: Strategy) -> Cadence:
    """`--snapshot-every auto`: every step where that is a copy within memory, every 5 s from a GPU."""
    if text == "auto":
        text = "1" if world.device.type == "cpu" else "5s"
    # Where each rank holds its share alone there is no whole state to keep: a checkpoint is the resume point.
    return Cadence.parse(text if world.position.memories and not strategy.is_sharded else "never")
