"""One process, one device, no communication; and the defaults that other strategies inherit."""

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


class SingleStrategy:
    """Leaves the model unchanged."""

    shards_parameters = False
    shards_state = False
    checks_gradients = False
    has_buckets = False
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
        if group.size > 1:
            raise ConfigError(
                f"--strategy single trains in one process, but there are {group.size} ranks; "
                "use --strategy ddp, or --nproc 1 on one node"
            )

    def check_exchange(self, exchange: ExchangeConfig) -> None:
        """Raise ConfigError for settings that only ddp supports."""
        for each in dataclasses.fields(exchange):
            if getattr(exchange, each.name) != each.default:
                flag = "--" + each.name.replace("_", "-")
                raise ConfigError(f"{flag} works only with --strategy ddp; remove it, or use --strategy ddp")

    def build(self, make: Callable[[], nn.Module]) -> nn.Module:
        return make()

    def shard(self, model: nn.Module) -> nn.Module:
        return model

    def shard_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        return optimizer

    def compiled(self, model: nn.Module, mode: str) -> nn.Module:
        module = torch.compile(model, mode=mode)
        assert isinstance(module, nn.Module)
        return module

    def wrap(self, module: nn.Module, slots: int) -> None:
        self._module: Callable[[Any], tuple[Tensor, Tensor]] = module

    def micro_step(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def forward(self, slots: Tensor, batch: Any, scale: Tensor, so_far: Tensor) -> tuple[Tensor, Tensor]:
        loss, numbers = self._module(batch)
        self._slots = pack(slots, so_far + numbers)
        return loss * scale, numbers

    def exchange(self, gradients_not_finite: Tensor) -> Tensor:
        return torch.cat([self._slots, gradients_not_finite.reshape(1)])

    def reset(self) -> None:
        pass

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        gradients = [p.grad for p in parameters if p.grad is not None]
        # A sparse gradient may contain a row several times; coalesce() adds those up.
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return nn.utils.get_total_norm(dense)

    def clip(self, parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
        return nn.utils.clip_grad_norm_(parameters, largest)

    def gradients(self, loss: Tensor, parameters: list[nn.Parameter]) -> None:
        # With backward(), DDP would count these gradients as those of a step.
        torch.autograd.grad(loss, parameters, allow_unused=True)

    def gather_full(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def local_state(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def with_shards(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def rows(self, length: int) -> tuple[int, int]:
        return 0, length

    def load_model(self, model: nn.Module, state: Mapping[str, Tensor], strict: bool = True) -> None:
        model.load_state_dict(state, strict=strict)

    def load_optimizer(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        optimizer.load_state_dict(dict(state))

    def exchange_state(self) -> dict[str, Any]:
        return {}

    def load_exchange(self, state: Mapping[str, Any]) -> None:
        pass

    def check_gradients(self) -> None:
        pass

    def sync_bytes(self, parameters: Sequence[nn.Parameter]) -> int:
        return sum(p.numel() * p.element_size() for p in parameters)

    def hidden_sync_seconds(self) -> float:
        return 0.0
