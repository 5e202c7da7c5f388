"""The values that all ranks know after a step: their layout, and how to read them without blocking a GPU.

The strategy exchanges them, together with the gradients or in a small all-reduce. See
docs/architecture.md#the-telemetry-parameter.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.distributed.group import ProcessGroup
from tandem.telemetry.meter import Consensus as Consensus

STOP, LOSS, LOSS_NOT_FINITE, DECISIONS = range(4)
SLOTS = 4
"""The fixed slots. Two more follow for each of the task's sums: the sum and its count."""
GRADIENTS_NOT_FINITE = -1
"""The last value that a strategy returns, in addition to its inputs: known only with the gradients."""


def proposal_slots(stop: bool, decisions: int) -> Tensor:
    """Return a rank's slots without its loss: a stop request, and rank 0's decisions as bits."""
    return torch.tensor([float(stop), 0.0, 0.0, float(decisions)])


def pack(slots: Tensor, numbers: Tensor) -> Tensor:
    """Return all slots of this rank, from `proposal_slots` and [loss, sum, count, sum, count...] of the step.

    A loss that is not finite becomes a flag, and a sum that is not finite becomes zero, because a NaN would
    spread to all ranks.
    """
    loss = numbers[0]
    finite = torch.isfinite(loss)
    masked = torch.where(finite, loss, torch.zeros_like(loss)).float()
    head = torch.stack([slots[STOP], masked, (~finite).float(), slots[DECISIONS]])
    if len(numbers) == 1:
        return head
    return torch.cat([head, torch.nan_to_num(numbers[1:], posinf=0.0, neginf=0.0)])


def is_skipped(exchanged: Tensor) -> Tensor:
    """Return a scalar on the device: 1 if the step must change nothing, else 0."""
    return ((exchanged[LOSS_NOT_FINITE] + exchanged[GRADIENTS_NOT_FINITE]) > 0).float()


class ConsensusReader:
    """Reads the exchanged values: immediately on CPUs, one step later on GPUs (no host synchronization)."""

    def __init__(self, group: ProcessGroup, names: Sequence[str]) -> None:
        self._group = group
        self._names = names
        self._pending: tuple[int, Tensor, torch.cuda.Event] | None = None

    def read(self, step: int, exchanged: Tensor) -> Consensus | None:
        """Return the consensus of `step` (CPU) or of the previous step (GPU; None for the first)."""
        if self._group.device.type != "cuda":
            return self._decode(step, exchanged.tolist())
        # The previous copy has had a whole step, so this hardly waits.
        before = self.drain()
        # A copy into memory that is not pinned would block the host until the GPU gets here.
        copy = torch.empty(len(exchanged), pin_memory=True)
        copy.copy_(exchanged, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending = (step, copy, event)
        return before

    def drain(self) -> Consensus | None:
        """Return the last values that are still being copied from the GPU."""
        if self._pending is None:
            return None
        step, copy, event = self._pending
        self._pending = None
        event.synchronize()
        return self._decode(step, copy.tolist())

    def _decode(self, step: int, mean: list[float]) -> Consensus:
        totals = [value * self._group.size for value in mean[SLOTS:GRADIENTS_NOT_FINITE]]
        return Consensus(
            step=step,
            # `pack` replaced a loss that is not finite by zero, so the mean would be wrong.
            loss=math.nan if mean[LOSS_NOT_FINITE] > 0 else mean[LOSS],
            # A flag of a single rank makes the mean positive.
            stop=mean[STOP] > 0,
            is_skipped=mean[LOSS_NOT_FINITE] + mean[GRADIENTS_NOT_FINITE] > 0,
            # Only rank 0 has bits of events here; those of other ranks are above them (training/loop.py). The
            # rounding removes the error of the division.
            decisions=round(mean[DECISIONS] * self._group.size),
            sums=dict(zip(self._names, zip(totals[::2], totals[1::2], strict=True), strict=True)),
        )
