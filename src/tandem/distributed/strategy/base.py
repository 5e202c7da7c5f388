"""What a strategy must do: everything about a step and a state that depends on how the model is spread out.

    strategy = load(name, group)                 the group is open
    model = strategy.spread(model)               before the optimizer is built
    optimizer = strategy.spread_optimizer(...)   once, when it has been built
    strategy.load_model, strategy.load_optimizer resume
    strategy.wrap(...)                           before the first step
    each micro-batch: with strategy.micro_step(is_last): strategy.forward(...), then backward
    after the last:   strategy.exchange(...), then norm or clip, then the optimizer
    strategy.whole(...)                          to save, and for the digest at the end

All ranks call each method at the same point, unless it says that it exchanges nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """One process's part in it.

    After each step the parameters are the same on all ranks, or shared out over them: comparison of replicas,
    scores and saves go by that. What a rank alone remembers from step to step is its `exchange_state`.
    """

    shares_parameters: bool
    """Whether this rank holds only its part of the parameters. Then there are no replicas to compare, and
    every forward pass needs all ranks, in evaluation as well."""
    shares_state: bool
    """Whether no rank has the whole state of model and optimizer by itself. Then there is nothing to keep in
    a node's memory after a step, and a checkpoint is where a restart goes back to."""
    checks_gradients: bool
    """Whether a parameter that a step gives no gradient is refused, unless --find-unused allows it."""

    def spread(self, model: nn.Module) -> nn.Module:
        """The model as it is to be trained; its parameters may be others afterwards."""
        ...

    def spread_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, built for the model that `spread` gave, as it is to take steps; mostly as it is."""
        ...

    def compiled(self, model: nn.Module, mode: str) -> nn.Module:
        """What trains in the model's place, compiled in a `--compile` mode. Where no gradients are recorded
        the model computes as without it. Raises ConfigError. Exchanges nothing."""
        ...

    def wrap(self, module: nn.Module, slots: int) -> None:
        """Take the training module: `module(batch)` gives (this rank's weighted loss, its numbers).

        `slots`: how many numbers the ranks exchange in a step (see consensus.py).
        """
        ...

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients are reduced over ranks in the last only."""
        ...

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        """(what to run backward on, the module's numbers) of a micro-batch.

        `slots` is what this rank proposes (`consensus.proposal_slots`), `scale` is fp16's, `so_far` the sum
        of the numbers of the step's earlier micro-batches.
        """
        ...

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        """After the last backward: the mean of every slot over ranks, on the device, nobody waits for it.

        `gradients_not_finite`: a scalar, above 0 if a gradient that this rank holds is not finite; it is the
        last of the slots that come back, above 0 if that is so on any rank.
        """
        ...

    def reset(self) -> None:
        """After a step: what it has exchanged is forgotten. Exchanges nothing."""
        ...

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter or gradient that is in this rank's memory. Exchanges nothing."""
        ...

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of all gradients, as a scalar on the device."""
        ...

    def clip(self, parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
        """Scale the gradients down to a norm of `largest`; the norm that they had."""
        ...

    def gradients(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        """A backward pass outside `micro_step`, to count its work; the caller resets all gradients."""
        ...

    def whole(self, state: dict[str, Any]) -> dict[str, Any]:
        """State dicts of model and optimizer as every strategy can load them: no share, but whole tensors.

        They are there on rank 0; the other ranks take part.
        """
        ...

    def load_model(self, model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
        """Load a whole `state_dict`, which every rank has. Exchanges nothing."""
        ...

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load a whole `state_dict`, which every rank has. Exchanges nothing."""
        ...

    def exchange_state(self) -> dict[str, Any]:
        """What the exchange of gradients remembers from step to step, to be saved; whole on rank 0."""
        ...

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        """What `exchange_state` gave, which every rank has. Exchanges nothing."""
        ...

    def check_gradients(self) -> None:
        """After a backward pass: raise ConfigError where parameters lack a gradient that must have one."""
        ...

    def sync_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        """Bytes of gradients that this rank hands to the all-reduce in a step. Exchanges nothing."""
        ...

    def hidden_sync_seconds(self) -> float:
        """Exchange of gradients behind backward's own work, in a recent step; 0.0 where it is not known."""
        ...
