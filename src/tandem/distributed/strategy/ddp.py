"""DistributedDataParallel: every rank has the whole model, and gradients are averaged during backward.

The values that all ranks must know after a step are exchanged in the same all-reduce, through an extra
parameter: a separate all-reduce would cost 2.4 ms of a 4.3 ms step (gloo, 2 ranks).
"""

import gc
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem.config.slices import ExchangeConfig
from tandem.distributed.compression import compression, ddp_arguments
from tandem.distributed.consensus import is_skipped, pack
from tandem.distributed.group import has_buffers_beside_batchnorm
from tandem.distributed.strategy.ddp_one_rank import OneRankDDPStrategy, UnusedParametersError, listed
from tandem.torch_private import buffer_argument, hidden_sync_seconds


class Telemetry(nn.Module):
    """A wrapper of the training module with a zero parameter that carries values through the all-reduce.

    The product of the parameter (all zeros) and this rank's values is added to the loss. The loss does not
    change, and the parameter's averaged gradient is the mean of the values over ranks. The parameter is never
    optimized or saved.
    """

    def __init__(self, module: nn.Module, slots: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.module = module  # not moved: parts of a model may be on several devices
        self.carrier = nn.Parameter(torch.zeros(slots, device=device))

    def forward(
        self, slots: Tensor, carries: float, batch: Any, scale: Tensor, so_far: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (tensor for backward, module's values); `carries` is 1 in the last micro-batch, else 0."""
        loss, numbers = self.module(batch)
        # Gradients of micro-batches add up, so only the last micro-batch carries the values, those of all.
        # fp16's scale is not applied to them, because the optimizer does not unscale the carrier. See
        # docs/architecture.md#the-telemetry-parameter.
        carried = pack(slots, so_far + numbers)
        return loss * scale + (self.carrier * (carried * carries)).sum(), numbers


class DDPStrategy(OneRankDDPStrategy):
    """Gradients are means over ranks; weights are equal on all of them from the start."""

    has_buckets = True

    def check_exchange(self, exchange: ExchangeConfig) -> None:
        super().check_exchange(exchange)
        self._compression = compression(exchange, self._group)
        self._arguments = ddp_arguments(exchange)
        # Each rank has its own errors, so only a checkpoint has the whole state.
        self.shards_state = self._compression is not None and self._compression.remembers

    def wrap(self, module: nn.Module, slots: int) -> None:
        """Wrap the module with DDP, without its broadcast of buffers if those are all BatchNorm's.

        BatchNorm's running statistics are not read in training mode, so the broadcast before every forward
        pass is unnecessary. Evaluation gets rank 0's buffers.
        """
        buffers = buffer_argument(has_buffers_beside_batchnorm(module))
        telemetry = Telemetry(module, slots, self._group.device)
        if self.__dict__.pop("_ddp", None) is not None:  # other parameters are trained from here on
            gc.collect()  # its hooks on the parameters disappear with the last reference to it
        self._carrier = telemetry.carrier
        self._is_last = True
        self._ddp = DistributedDataParallel(
            telemetry,
            device_ids=self._group.ddp_devices,
            gradient_as_bucket_view=True,
            **buffers,
            **self._arguments,
        )
        if self._compression is not None:
            self._compression.attach(self._ddp, self._carrier, self._named)

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        self._is_last = is_last
        return nullcontext() if is_last else self._ddp.no_sync()

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        try:
            result: tuple[Tensor, Tensor] = self._ddp(slots, float(self._is_last), batch, scale, so_far)
        except RuntimeError as error:
            # DDP raises a plain RuntimeError, in the forward pass after the step.
            if "find_unused_parameters" not in str(error):
                raise
            raise UnusedParametersError(
                f"in the previous step, no gradient reached {listed(self._in_message(str(error)))}; "
                "use --find-unused if a step may leave out parameters"
            ) from error
        return result

    def _in_message(self, message: str) -> list[str]:
        """Return the names in DDP's error, which lists indices among the parameters that it reduces."""
        indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", message)
        names = {id(p): name for name, p in self._named.items()}
        trained = [names.get(id(p), "") for p in self._ddp.parameters() if p.requires_grad]
        return [trained[int(index)] for index in indices[1].split()] if indices else ["some parameters"]

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """Return the slots.

        The reduced gradients are equal on all ranks, so each one finds the same result.
        """
        assert self._carrier.grad is not None
        exchanged = torch.cat([self._carrier.grad, gradients_not_finite.reshape(1)])
        if self._compression is not None:
            self._compression.commit(is_skipped(exchanged))
        return exchanged

    def reset(self) -> None:
        if self._compression is not None:
            self._compression.rollback()
        if self._carrier.grad is not None:
            self._carrier.grad.zero_()

    def exchange_state(self) -> dict[str, Any]:
        return self._compression.state() if self._compression is not None else {}

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        if self._compression is not None:
            self._compression.load(state)

    def sync_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        if self._compression is not None:
            return self._compression.bytes_of(parameters)
        return super().sync_bytes(parameters)

    def hidden_sync_seconds(self) -> float:
        return hidden_sync_seconds(self._ddp)
