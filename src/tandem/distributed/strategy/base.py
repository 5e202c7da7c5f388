"""The base class of strategies: everything in a step or a state that depends on how the model is distributed.

    strategy = load(name, group)                 the group is open
    model = strategy.build(make_model)
    model = strategy.shard(model)                before the optimizer is built
    optimizer = strategy.shard_optimizer(...)    once, when it has been built
    strategy.load_model, strategy.load_optimizer resume
    strategy.wrap(...)                           before the first step
    each micro-batch: with strategy.micro_step(is_last): strategy.forward(...), then backward
    after the last:   strategy.exchange(...), then norm or clip, then the optimizer
    strategy.local_state(...)                    to save
    strategy.gather_full(...)                    for the digest at the end

All ranks call each method at the same point, unless its docstring says that it needs no communication. The
methods here communicate nothing: they are those of one process that has the whole model.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.consensus import pack
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError


class Strategy:
    """The part of a strategy in one process.

    After each step, the parameters are the same on all ranks, or sharded over them: replica checks, scores
    and saves rely on it. State that differs between ranks and lasts for several steps is `exchange_state`.
    """

    shards_parameters = False
    """True if this rank has only its shard of the parameters.

    Then there are no replicas to compare, and every forward pass needs all ranks, even in evaluation. Each
    rank keeps snapshots of its own shard.
    """
    shards_state = False
    """True if no rank has the whole state of model and optimizer.

    Then there are no in-memory snapshots, and a restart goes back to a checkpoint, unless `shards_parameters`
    is also set.
    """
    checks_gradients = False
    """True if a parameter without a gradient after a step is rejected, unless --find-unused is set."""
    has_buckets = False
    """True if gradients stay in DDP's buckets: before several micro-batches they are zeroed, not dropped."""
    has_one_device = False
    """True if the strategy requires the model to be on one device."""

    def __init__(self, group: ProcessGroup, exchange: ExchangeConfig, _compute: ComputeConfig) -> None:
        self._group = group
        self._slots = torch.zeros(0)
        self.check(group)
        if self.has_one_device and len(group.devices) > 1:
            raise ConfigError(
                "--devices-per-rank works only with --strategy ddp or single; remove it, or use one of those"
            )
        self.check_exchange(exchange)

    @staticmethod
    def warm_up() -> None:
        """Import the strategy's dependencies in advance, in a process that may become a rank."""

    def check(self, group: ProcessGroup) -> None:
        """Raise ConfigError if this strategy cannot work with the group."""

    def check_exchange(self, exchange: ExchangeConfig) -> None:
        """Raise ConfigError for settings that only ddp supports."""
        for each in dataclasses.fields(exchange):
            if getattr(exchange, each.name) != each.default:
                flag = "--" + each.name.replace("_", "-")
                raise ConfigError(f"{flag} works only with --strategy ddp; remove it, or use --strategy ddp")

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return the model that `make` builds on this rank, maybe without its values until `shard`."""
        return make()

    def shard(self, model: nn.Module) -> nn.Module:
        """Return the model to train, which may have other parameters."""
        return model

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return the optimizer to use, given one built for the result of `shard`; usually unchanged."""
        return optimizer

    def compiled(self, model: nn.Module, mode: str) -> nn.Module:
        """Return the module to train, compiled in a `--compile` mode. Needs no communication.

        Without gradients, the model computes as if it were not compiled. Raises ConfigError.
        """
        module = torch.compile(model, mode=mode)
        assert isinstance(module, nn.Module)
        return module

    def wrap(self, module: nn.Module, slots: int) -> None:
        """Set the training module: `module(batch)` returns (this rank's weighted loss, its values).

        `slots`: how many values the ranks exchange in a step (see consensus.py).
        """
        self._module: Callable[[Any], tuple[Tensor, Tensor]] = module

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        """Context of a micro-batch's forward and backward; gradients are reduced only in the last one."""
        return nullcontext()

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        """Return (the tensor to run backward on, the module's values) for a micro-batch.

        `slots` is this rank's proposal (`consensus.proposal_slots`), `scale` is fp16's loss scale, and
        `so_far` the sum of the values of the step's earlier micro-batches.
        """
        loss, numbers = self._module(batch)
        self._slots = pack(slots, so_far + numbers)
        return loss * scale, numbers

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """Return the mean of every slot over ranks after the last backward, on the device, without waiting.

        `gradients_not_finite`: a scalar, above 0 if a gradient on this rank is not finite. It is returned as
        the last slot, above 0 if it is above 0 on any rank.
        """
        return torch.cat([self._slots, gradients_not_finite.reshape(1)])

    def reset(self) -> None:
        """Forget the exchanged values after a step. Needs no communication."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return the part of a parameter or gradient in this rank's memory. Needs no communication."""
        return tensor

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of all gradients, as a scalar on the device."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        # A sparse gradient may contain a row several times; coalesce() adds those up.
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return nn.utils.get_total_norm(dense)

    def clip(self, parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
        """Scale gradients down to a norm of at most `largest`; return their previous norm."""
        return nn.utils.clip_grad_norm_(parameters, largest)

    def gradients(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """Run a backward pass outside `micro_step`, to count its work; the caller resets all gradients."""
        # With backward(), DDP would count these gradients as those of a step.
        torch.autograd.grad(loss, parameters, allow_unused=True)

    def gather_full(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return state dicts of model and optimizer with full tensors, which every strategy can load.

        They are complete on rank 0; the other ranks take part.
        """
        return state

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return state dicts of model and optimizer with a `shards.shard` for each sharded tensor."""
        return state

    def with_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return what `load_model` and `load_optimizer` accept, given a rank's state from `local_state`.

        Needs no communication.
        """
        return state

    def rows(self, length: int) -> tuple[int, int]:
        """Return (first row, number of rows) of this rank's part of a sharded tensor with `length` rows."""
        return 0, length

    def load_model(self, model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load a full `state_dict`, which every rank has, or one of `with_shards`. Needs no communication."""
        model.load_state_dict(state, strict=strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a full `state_dict`, which every rank has, or one of `with_shards`. Needs no communication."""
        optimizer.load_state_dict(dict(state))

    def exchange_state(self) -> dict[str, Any]:
        """Return the part of the gradient exchange's state to save in a checkpoint; complete on rank 0."""
        return {}

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        """Load the result of `exchange_state`, which every rank has. Needs no communication."""

    def check_gradients(self) -> None:
        """Raise ConfigError after a backward pass if a required gradient is missing."""

    def sync_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return how many bytes of gradients this rank passes to a step's all-reduce. No communication."""
        return sum(p.numel() * p.element_size() for p in parameters)

    def hidden_sync_seconds(self) -> float:
        """Return how long a recent step's exchange overlapped with backward; 0.0 if unknown."""
        return 0.0
