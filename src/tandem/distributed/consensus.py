"""What all ranks know after a step, at no collective of its own: it travels in the gradient all-reduce."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from tandem.distributed.group import ProcessGroup
from tandem.telemetry.meter import Agreed as Agreed


class Telemetry(nn.Module):
    """A module around the training module whose zero parameter carries numbers through the all-reduce.

    The product of the parameter (all zeros) with this rank's values is added to the loss: the loss does
    not change, and the parameter's averaged gradient is the mean of the values over ranks. It saves an
    all-reduce of its own per step (2.4 ms on a 4.3 ms step, gloo, 2 ranks). Never optimised or saved.
    """

    SLOTS = 4  # stop requested, loss, loss not finite, rank 0's decisions
    LOSS_NOT_FINITE = 2

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.carrier = nn.Parameter(torch.zeros(self.SLOTS))

    def forward(self, values: Tensor, *args: Any) -> tuple[Tensor, Tensor, Any]:
        """(loss to run backward on, plain loss, task metrics); `values` are this rank's slots."""
        scaled, loss, metrics, accumulated = self.module(*args)
        finite = torch.isfinite(accumulated)
        carried = torch.stack(
            [
                values[0],
                torch.where(finite, accumulated, torch.zeros_like(accumulated)).float(),
                (~finite).float(),
                values[3],
            ]
        )
        return scaled + (self.carrier * (carried * values[1])).sum(), loss, metrics


class AgreedReader:
    """Reads the carrier's gradient: at once on CPUs, one step later on GPUs (no host synchronisation)."""

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._pending: tuple[int, Tensor, torch.cuda.Event] | None = None

    def read(self, step: int, carried: Tensor, left_out: Tensor) -> Agreed | None:
        """What was agreed in `step` (CPU) or in the step before it (GPU; None at the first).

        `carried` is the carrier's gradient, `left_out` a scalar above 0 if the step changes nothing.
        """
        if self._world.device.type != "cuda":
            return self._decode(step, [*carried.tolist(), float(left_out)])
        before = self.drain()
        copy = torch.empty(Telemetry.SLOTS + 1, pin_memory=True)
        copy.copy_(torch.cat([carried, left_out.reshape(1)]), non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        self._pending = (step, copy, event)
        return before

    def drain(self) -> Agreed | None:
        """The last numbers still on their way from the GPU."""
        if self._pending is None:
            return None
        step, copy, event = self._pending
        self._pending = None
        event.synchronize()
        return self._decode(step, copy.tolist())

    def _decode(self, step: int, mean: list[float]) -> Agreed:
        return Agreed(
            step=step,
            loss=math.nan if mean[Telemetry.LOSS_NOT_FINITE] > 0 else mean[1],
            stop=mean[0] > 0,
            left_out=mean[4] > 0,
            decisions=round(mean[3] * self._world.size),
        )
