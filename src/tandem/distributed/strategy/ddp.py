"""DistributedDataParallel: every rank has the whole model, gradients are averaged while backward still runs.

What all ranks must know after a step travels in the same all-reduce, by a parameter made for it: one of its
own would cost 2.4 ms of a 4.3 ms step (gloo, 2 ranks).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem.distributed.consensus import pack
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.distributed.strategy import single
from tandem.torch_private import buffer_argument, hidden_sync_seconds


class Telemetry(nn.Module):
    """A module around the training module whose zero parameter carries numbers through the all-reduce.

    The product of the parameter (all zeros) with this rank's values is added to the loss: the loss does
    not change, and the parameter's averaged gradient is the mean of the values over ranks. Never optimised
    or saved.
    """

    def __init__(self, module: nn.Module, slots: int) -> None:
        super().__init__()
        self.module = module
        self.carrier = nn.Parameter(torch.zeros(slots))

    def forward(
        self, slots: Tensor, carries: float, batch: Any, scale: Tensor, so_far: Tensor
    ) -> tuple[Tensor, Tensor]:
        """(what to run backward on, the module's numbers); `carries` is 1 in the last micro-batch, else 0."""
        loss, numbers = self.module(batch)
        carried = pack(slots, so_far + numbers)
        return loss * scale + (self.carrier * (carried * carries)).sum(), numbers


class Strategy(single.Strategy):
    """Gradients are means over ranks; weights are equal on all of them from the start."""

    def check(self, group: ProcessGroup) -> None:
        """It works with any number of ranks."""

    def wrap(self, module: nn.Module, slots: int) -> None:
        """BatchNorm's running statistics are not read in training mode, so a model whose buffers are all
        BatchNorm's does without DDP's broadcast before every forward; evaluation gets rank 0's."""
        buffers = buffer_argument(has_buffers_beside_batchnorm(module))
        telemetry = Telemetry(module, slots).to(self._group.device)
        self._carrier = telemetry.carrier
        self._is_last = True
        self._ddp = DistributedDataParallel(
            telemetry,
            device_ids=[self._group.device] if self._group.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            **buffers,
        )

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        self._is_last = is_last
        return nullcontext() if is_last else self._ddp.no_sync()

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self._ddp(slots, float(self._is_last), batch, scale, so_far)
        return result

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """The reduced gradients are equal on all ranks, so each comes to the same answer by itself."""
        assert self._carrier.grad is not None
        return torch.cat([self._carrier.grad, gradients_not_finite.reshape(1)])

    def reset(self) -> None:
        if self._carrier.grad is not None:
            self._carrier.grad.zero_()

    def hidden_sync_seconds(self) -> float:
        return hidden_sync_seconds(self._ddp)
