"""A model that its owner calls like any other, its gradients means over ranks: DDP, and a passenger.

What ranks have to agree on in a step travels inside the gradient exchange, as with `strategy.ddp`; an
all-reduce of its own would cost 2.4 ms of a 4.3 ms step (gloo, 2 ranks). There the loss is computed inside
the module that DDP wraps, here outside: an identity at the model's output puts this rank's numbers where the
gradient of a parameter made for it would be, whenever a backward pass comes through this model.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tandem.config.slices import ExchangeConfig
from tandem.distributed.compression import compression, ddp_arguments
from tandem.distributed.group import ProcessGroup, has_buffers_beside_batchnorm
from tandem.torch_private import buffer_argument


@dataclass
class Passenger:
    """Numbers on their way through one backward pass: set before it, taken along by the models it meets."""

    numbers: Tensor


class _Carry(torch.autograd.Function):
    """Identity on a model's output. Backward: the passenger's numbers are the carrier's gradient, once."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, carrier: Tensor, module: "_Carrying") -> Tensor:
        ctx.module = module
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], ctx.module.take_along(), None


class _Carrying(nn.Module):
    """What DDP wraps: the model with a zero parameter beside it, which is never optimised or saved."""

    def __init__(self, model: nn.Module, passenger: Passenger) -> None:
        super().__init__()
        self.model, self._passenger = model, passenger
        self.carrier = nn.Parameter(torch.zeros_like(passenger.numbers))
        self.is_settling, self.has_taken = False, False

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if self.is_settling:
            parameters = [p for p in self.parameters() if p.requires_grad]
            return torch.stack([p.sum().float() * 0 for p in parameters]).sum()
        output = self.model(*inputs, **named)
        return self._attached(output)[0] if torch.is_grad_enabled() else output

    def take_along(self) -> Tensor:
        """The numbers; zeros when they are aboard already, because the model was called more than once."""
        if self.has_taken:
            return torch.zeros_like(self.carrier)
        self.has_taken = True
        return self._passenger.numbers.clone()

    def _attached(self, output: Any) -> tuple[Any, bool]:
        """`output` with the carrier at its first tensor that has a gradient, and whether there was one."""
        if isinstance(output, Tensor):
            if not output.requires_grad:
                return output, False
            return _Carry.apply(output, self.carrier, self), True
        if isinstance(output, dict):
            for key, value in output.items():
                value, found = self._attached(value)
                if found:
                    changed = copy.copy(output)
                    changed[key] = value
                    return changed, True
        if type(output) in (tuple, list):
            for index, value in enumerate(output):
                value, found = self._attached(value)
                if found:
                    return type(output)([*output[:index], value, *output[index + 1 :]]), True
        return output, False


def give_rank_0s_weights(model: nn.Module, group: ProcessGroup) -> None:
    """Make a model that nothing is exchanged of equal on all ranks."""
    if group.size > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)


class Replica(DistributedDataParallel):
    """A model on this rank, with rank 0's weights. What DDP does not know is looked for in the model."""

    def __init__(
        self, model: nn.Module, group: ProcessGroup, passenger: Passenger, exchange: ExchangeConfig
    ) -> None:
        super().__init__(
            _Carrying(model, passenger),
            device_ids=group.ddp_devices,
            gradient_as_bucket_view=True,
            **buffer_argument(has_buffers_beside_batchnorm(model)),
            **ddp_arguments(exchange),
        )
        compressed = compression(exchange, group)
        if compressed is not None:
            compressed.attach(self, self.module.carrier, dict(model.named_parameters()))
        self._settle()

    def _settle(self) -> None:
        """A backward pass of zeros, whose order of gradients follows from the parameters alone.

        DDP reduces its first step in initial buckets, and later ones in buckets rebuilt by the order in which
        gradients came; another layout sums in another order (seen from 3 ranks on). So that a resumed run has
        the buckets of an undisturbed one, this is the first step for both.
        """
        self.module.is_settling = True
        self(None).backward()
        self.module.is_settling = False
        for parameter in self.module.parameters():
            parameter.grad = None

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        model = self.module.model
        assert isinstance(model, nn.Module)
        return model

    def begin_backward(self) -> None:
        """Forget the numbers of the pass before."""
        self.module.has_taken = False
        if self.module.carrier.grad is not None:
            self.module.carrier.grad.zero_()

    def arrived(self) -> Tensor | None:
        """The numbers' means over ranks, if the last pass has come through here and exchanged gradients."""
        carrier: nn.Parameter = self.module.carrier
        return carrier.grad if self.module.has_taken else None

    def exchange_with_next(self, is_last: bool) -> None:
        """Whether the next forward and backward pass ends in the exchange, or adds up on this rank alone."""
        self.require_backward_grad_sync = is_last

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.model.parameters(recurse)

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*arguments, **named)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.model.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.model.load_state_dict(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """A copy, such as the average of an EMA, is no replica: nothing exchanges its gradients."""
        return copy.deepcopy(self.model, memo)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__["_modules"] or "module" not in self.__dict__["_modules"]:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)
