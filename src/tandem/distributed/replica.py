"""A model for custom loops that averages gradients over ranks: DDP plus piggybacked values.

The values that ranks must agree on in a step are exchanged with the gradients, as in `strategy.ddp`; a
separate all-reduce would cost 2.4 ms of a 4.3 ms step (gloo, 2 ranks). In `strategy.ddp`, the module that DDP
wraps computes the loss; here, the loss is computed outside. So a hook on one of the model's parameters sets
this rank's values as the gradient of an extra parameter whenever a backward pass runs through the model. See
docs/architecture.md#the-telemetry-parameter.
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
from tandem.distributed.strategy.ddp import unused_in
from tandem.errors import ConfigError
from tandem.torch_private import buffer_argument


@dataclass
class PiggybackedValues:
    """Values for one backward pass: set before it, and sent by the models that it runs through."""

    numbers: Tensor


# DDP's search for tensors also looks into dataclasses.
@dataclass
class _Used:
    """An output in which DDP finds the tensor but to which it gives no gradient.

    pytree does not know this class.
    """

    tensor: Tensor


class _Carrying(nn.Module):
    """The module that DDP wraps: the model and an extra zero parameter, never optimized or saved.

    In a backward pass, the values become that parameter's gradient as soon as one of the model's parameters
    has its own. This requires nothing of the model's output, which may have any type.
    """

    def __init__(self, model: nn.Module, piggybacked: PiggybackedValues, finds_unused: bool) -> None:
        super().__init__()
        self.model = model
        self._piggybacked = piggybacked
        self.carrier = nn.Parameter(torch.zeros_like(piggybacked.numbers))
        self.is_zero_pass = self.is_due = self.has_taken = False
        # DDP reads this attribute of the module that it wraps, where the model's names have a prefix.
        ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
        self._ddp_params_and_buffers_to_ignore = [f"model.{name}" for name in ignored]
        named = {n: p for n, p in model.named_parameters() if p.requires_grad and n not in ignored}
        self.exchanged = list(named.values())
        self.names = ["", *named]
        """Names of the parameters that DDP exchanges, in its order; the carrier comes first."""
        # DDP waits for each parameter's gradient, and the last layer's comes first. If a pass may leave out
        # parameters, any parameter may be the first.
        for parameter in self.exchanged if finds_unused else self.exchanged[-1:]:
            parameter.register_post_accumulate_grad_hook(self._add_piggybacked)  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return (output, carrier). DDP treats parameters as unused if no returned tensor depends on them."""
        if self.is_zero_pass:
            zeros = [_zero_through(p, sparse) for p, sparse in self._with_kinds()]
            return (torch.stack([zero.to(self.carrier.device) for zero in zeros]).sum(),)
        # A forward pass without gradients is followed by no backward pass.
        self.is_due = torch.is_grad_enabled()
        return self.model(*inputs, **named), _Used(self.carrier.view_as(self.carrier))

    def _add_piggybacked(self, _parameter: Tensor) -> None:
        """Add the values in a backward pass: once, then zeros, however often the model was called."""
        if self.is_due:
            self.is_due = False
            # Gradients of several passes add up, so only one of them may have the values.
            numbers = torch.zeros_like(self.carrier) if self.has_taken else self._piggybacked.numbers.clone()
            self.has_taken = True
            # DDP's hooks run when the autograd engine accumulates a gradient. An assignment would not trigger
            # them.
            self.carrier.backward(numbers)  # type: ignore[no-untyped-call]

    def _with_kinds(self) -> Iterator[tuple[nn.Parameter, bool]]:
        """Yield the exchanged parameters, and whether DDP expects a sparse gradient for each."""
        layers = (m for m in self.model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        sparse = {id(layer.weight) for layer in layers if layer.sparse}
        yield from ((p, id(p) in sparse) for p in [*self.exchanged, self.carrier])


def _zero_through(parameter: nn.Parameter, sparse: bool) -> Tensor:
    """Return a scalar zero that gives `parameter` a gradient of zeros."""
    if sparse:
        row = torch.zeros(1, dtype=torch.long, device=parameter.device)
        values = nn.functional.embedding(row, parameter, sparse=True)
    else:
        # A backward pass starts from a real number.
        values = torch.view_as_real(parameter) if parameter.is_complex() else parameter
    return values.sum().float() * 0


def broadcast_weights(model: nn.Module, group: ProcessGroup) -> None:
    """Give all ranks the weights of rank 0, for a model without communication."""
    if group.size > 1:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor, src=0)


class Replica(DistributedDataParallel):
    """A model on this rank, with rank 0's weights. Attributes that DDP does not have are the model's."""

    def __init__(
        self, model: nn.Module, group: ProcessGroup, piggybacked: PiggybackedValues, exchange: ExchangeConfig
    ) -> None:
        super().__init__(
            _Carrying(model, piggybacked, exchange.find_unused),
            device_ids=group.ddp_devices,
            gradient_as_bucket_view=True,
            **buffer_argument(has_buffers_beside_batchnorm(model)),
            **ddp_arguments(exchange),
        )
        compressed = compression(exchange, group)
        if compressed is not None:
            compressed.attach(self, self.module.carrier, dict(model.named_parameters()))
        self._run_zero_pass()

    def _run_zero_pass(self) -> None:
        """Run a backward pass of zeros, in which the order of gradients depends only on the parameters.

        DDP reduces its first step in initial buckets, and later ones in buckets rebuilt in the order in which
        gradients arrived. A different layout adds in a different order (observed with 3 or more ranks). This
        pass is the first step of both a new and a resumed run, so that both have the same buckets.
        """
        self.module.is_zero_pass = True
        self().backward()
        self.module.is_zero_pass = False
        # Optimizers skip None, but treat zeros as a gradient (weight decay, momentum).
        for parameter in self.module.parameters():
            parameter.grad = None

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Return the model's own output. Raises ConfigError if the last pass left out parameters."""
        try:
            return super().forward(*inputs, **named)[0]  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # DDP reports it in the forward pass after the one that left out parameters.
            if not (names := unused_in(error, self.module.names)):
                raise
            raise ConfigError(
                f"in the previous pass of {type(self.model).__name__}, no gradient reached {names}; use them "
                "in the loss, freeze them before run.wrap, or set TANDEM_FIND_UNUSED=true if a pass may "
                "leave out parameters"
            ) from error

    @property
    def handled(self) -> frozenset[int]:
        """IDs of the parameters that DDP averages, and of those that the script told it to ignore."""
        ignored = set(getattr(self.model, "_ddp_params_and_buffers_to_ignore", ()))
        own = [p for name, p in self.model.named_parameters() if name in ignored]
        return frozenset(map(id, [*self.module.exchanged, *own]))

    @property
    def model(self) -> nn.Module:
        """The model without DDP."""
        model = self.module.model
        assert isinstance(model, nn.Module)
        return model

    def begin_backward(self) -> None:
        """Forget the values of the previous pass."""
        self.module.has_taken = False
        if self.module.carrier.grad is not None:
            self.module.carrier.grad.zero_()

    def arrived(self) -> Tensor | None:
        """Return the values' means over ranks, if the last pass exchanged gradients through this model."""
        carrier: nn.Parameter = self.module.carrier
        return carrier.grad if self.module.has_taken else None

    def set_gradient_sync(self, is_last: bool) -> None:
        """Exchange gradients in the next backward pass (`is_last`), or accumulate them on this rank only."""
        self.require_backward_grad_sync = is_last

    # The model's own names and parameters: optimizers and checkpoints must not see the carrier.
    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.model.parameters(recurse)

    def named_parameters(self, *arguments: Any, **named: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.model.named_parameters(*arguments, **named)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.model.state_dict(*arguments, **named)

    def load_state_dict(self, *arguments: Any, **named: Any) -> Any:
        return self.model.load_state_dict(*arguments, **named)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy only the model: a copy, such as an EMA average, exchanges no gradients."""
        return copy.deepcopy(self.model, memo)

    def __getattr__(self, name: str) -> Any:
        # Before DDP has registered `module`, looking in the model would recurse without end.
        if name in self.__dict__["_modules"] or "module" not in self.__dict__["_modules"]:
            return super().__getattr__(name)
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.model, name)
