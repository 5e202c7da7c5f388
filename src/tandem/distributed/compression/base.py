"""What a compression of DDP's gradients must do, and what none of them can."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from tandem.errors import ConfigError

Bucket = GradBucket
"""What DDP looks for in the signature of a hook."""


class Compression(Protocol):
    """What DDP's gradients travel as, and what that has to remember from step to step."""

    remembers: bool
    """Whether there is a state, of which every rank has its own part."""

    def attach(
        self, ddp: DistributedDataParallel, carrier: nn.Parameter, named: Mapping[str, nn.Parameter]
    ) -> None:
        """Take over the exchange of `ddp`, but for `carrier`; `named` are the parameters by lasting names."""
        ...

    def keep(self, skip: Tensor) -> None:
        """After a step: what it has changed in the state stays, unless it was left out (`skip` above 0)."""
        ...

    def forget(self) -> None:
        """Before a step: an exchange that `keep` was not called for has not happened."""
        ...

    def bytes_of(self, parameters: Sequence[nn.Parameter]) -> int:
        """What a rank hands to the all-reduce in a step."""
        ...

    def state(self) -> dict[str, Any]:
        """To be saved, whole on rank 0; all ranks call this."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave, on every rank. Exchanges nothing."""
        ...


def refuse_sparse(modules: nn.Module, word: str) -> None:
    """Raise ConfigError where gradients come as sparse tensors."""
    for name, module in modules.named_modules():
        if getattr(module, "sparse", False) is True:
            raise ConfigError(
                f"--gradient-compression {word}: the gradients of {name} are sparse; remove the setting, "
                "or create it with sparse=False"
            )
