"""What is kept of a run while it trains: checkpoints on the volume, snapshots in the node's memory."""

import logging
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from torch import nn

from tandem.checkpoint.flatten import flatten
from tandem.checkpoint.snapshot import Snapshots
from tandem.checkpoint.writer import CheckpointWriter
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import Strategy
from tandem.schedule import Cadence

log = logging.getLogger("tandem.saving")


class Saver:
    """Saves when it is told; leaving its `with` block waits for what is still being written.

    `state()` gives the run's state with "model" first, `info(step)` what the manifest says of it, and
    `own` the tensors (by order of appearance) of which only rank 0 has the values that count. `kept_slot`
    is that of the snapshot this world began with.
    """

    def __init__(
        self,
        world: ProcessGroup,
        writer: CheckpointWriter,
        state: Callable[[], Mapping[str, Any]],
        info: Callable[[int], Mapping[str, Any]],
        own: frozenset[int],
        kept_slot: int | None,
    ) -> None:
        self._is_first, self._writer, self._state, self._info, self._own = (
            world.is_first,
            writer,
            state,
            info,
            own,
        )
        position = world.position
        on_first_node = position.node_rank == 0 and bool(position.memories)
        self._snapshots = (
            Snapshots(position.memories, position.local_rank, kept_slot) if on_first_node else None
        )

    def save(self, step: int) -> None:
        """Rank 0 begins to save, see `CheckpointWriter.save`; the others help to gather the state."""
        state = self._state()
        if self._is_first:
            self._writer.save(step, {**state, "step": step}, self._info(step))

    def snapshot(self, step: int) -> None:
        """This rank's part of a snapshot on the first node; nothing elsewhere."""
        if self._snapshots is None:
            return
        try:
            self._snapshots.take(step, {**self._state(), "step": step}, self._own)
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
