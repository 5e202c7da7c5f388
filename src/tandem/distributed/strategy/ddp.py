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
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError, TandemError
from tandem.torch_private import buffer_argument, hidden_sync_seconds

MOST_NAMES = 5
"""How many parameter names to show in a message."""


class UnusedParametersError(TandemError):
    """A step of the task left out parameters that other steps train."""


def listed(names: Sequence[str]) -> str:
    """List the first few names, and how many more there are."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def unused_in(error: RuntimeError, trained: Sequence[str]) -> str:
    """List the parameters that DDP's `error` reports as unused; return "" for any other error.

    DDP lists indices among the parameters that it reduces. `trained` has their names, and "" for others.
    """
    if "find_unused_parameters" not in str(error):  # DDP raises a plain RuntimeError
        return ""
    indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
    named = [trained[int(index)] for index in indices[1].split()] if indices else []
    return listed([name for name in named if name]) or "some parameters"


class OneRankDDPStrategy(Strategy):
    """`--strategy ddp` with a single rank on a GPU: no gradients are exchanged, so the model is not wrapped.

    DDP would copy all gradients and split a compiled model into one graph per bucket. This class rejects the
    same models as DDP, so that a task behaves the same on one GPU as on several: each trained parameter needs
    a gradient unless --find-unused is set.
    """

    checks_gradients = True

    def check_exchange(self, exchange: ExchangeConfig) -> None:
        """Accept all settings, because they are meant for ddp."""
        self._exchange = exchange

    def shard(self, model: nn.Module) -> nn.Module:
        # The wrappers add prefixes to these names; messages show the model's own.
        self._named = dict(model.named_parameters())
        return model

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """Return the slots. Raises UnusedParametersError."""
        if without := self._without_gradient():
            raise UnusedParametersError(
                f"in this step, no gradient reached {listed(without)}; "
                "use --find-unused if a step may leave out parameters"
            )
        return super().exchange(gradients_not_finite)

    def check_gradients(self) -> None:
        """Raise ConfigError for parameters without a gradient, unless --find-unused is set.

        DDP would report them only in the next step, after a step whose gradients were not averaged.
        """
        if without := self._without_gradient():
            raise ConfigError(
                f"the loss has no gradient for {listed(without)}; use them in the loss, freeze them with "
                "requires_grad_(False), or use --find-unused"
            )

    def _without_gradient(self) -> list[str]:
        """Return the names of the trained parameters without a gradient; none with --find-unused."""
        if self._exchange.find_unused:
            return []
        return [name for name, p in self._named.items() if p.requires_grad and p.grad is None]


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
        # The task may freeze or unfreeze parameters later, but DDP keeps this list.
        names = {id(p): name for name, p in self._named.items()}
        self._exchanged = [names.get(id(p), "") for p in telemetry.parameters() if p.requires_grad]
        self._averaged = {n: p for n, p in self._named.items() if p.requires_grad}
        self._left_out = {n: p for n, p in self._named.items() if not p.requires_grad}
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
            # DDP raises it in the forward pass after the step.
            if not (names := unused_in(error, self._exchanged)):
                raise
            raise UnusedParametersError(
                f"in the previous step, no gradient reached {names}; "
                "use --find-unused if a step may leave out parameters"
            ) from error
        return result

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """Return the slots.

        The reduced gradients are equal on all ranks, so each one finds the same result. Raises ConfigError if
        a layer was frozen or unfrozen without DDP's knowledge.
        """
        left_out = self._left_out.items()
        unfrozen = [name for name, p in left_out if p.requires_grad and p.grad is not None]
        # DDP averages nothing unless all of these have gradients, and would report it only in the next step.
        frozen = [] if self._exchange.find_unused else self._averaged.items()
        if names := unfrozen + [name for name, p in frozen if not p.requires_grad]:
            raise ConfigError(
                f"the ranks do not average the gradients of this step, because {listed(names)} "
                f"{'were unfrozen' if unfrozen else 'were frozen'} after training began; freeze and unfreeze "
                "layers in the task's method freeze(model, epoch)"
            )
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
