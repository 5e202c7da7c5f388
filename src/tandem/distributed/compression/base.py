"""The interface of a gradient compression for DDP, and a check that all of them need."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from tandem.errors import ConfigError

Bucket = GradBucket
"""DDP requires this type in the signature of a hook."""


class Compression(Protocol):
    """The exchange of DDP's gradients, and the state that it needs from step to step."""

    remembers: bool
    """True if there is a state, which differs between ranks."""

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Take over the exchange of `ddp`, except for `carrier`; `named` has the parameters by name."""
        ...

    def commit(self, skip: Tensor) -> None:
        """Keep the changes of the state after a step, unless the step was skipped (`skip` above 0)."""
        ...

    def rollback(self) -> None:
        """Discard, before a step, the changes of an exchange after which `commit` was not called."""
        ...

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        """Return how many bytes a rank passes to the all-reduce in a step."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the state to save, complete on rank 0; all ranks call this."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state` on every rank, without communication."""
        ...


def refuse_sparse(modules: nn.Module, word: str) -> None:
    """Raise ConfigError if a module has sparse gradients."""
    for name, module in modules.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"--gradient-compression {word}: the gradients of {name} are sparse; remove the setting, "
                "or create it with sparse=False"
            )
