"""nn.DataParallel: one process, all its GPUs; without one it runs the model as it is, as torch does."""

from typing import Any

from torch import Tensor, nn

from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy import single
from tandem.errors import ConfigError


class _Gatherable(nn.Module):
    """The training module with outputs of one dimension: DataParallel puts those of all GPUs together."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, numbers = self.module(batch)
        return loss.reshape(1), numbers.reshape(1, -1)


class Strategy(single.Strategy):
    """The batch of this one process is cut over the GPUs; the first of them has the weights."""

    has_one_device = True

    def check(self, group: ProcessGroup) -> None:
        if group.size > 1:
            raise ConfigError(
                f"--strategy dp trains in one process with all its GPUs, and there are {group.size} ranks; "
                "use --nproc 1 on one node, or --strategy ddp"
            )

    def wrap(self, module: nn.Module, slots: int) -> None:
        parallel = nn.DataParallel(_Gatherable(module))

        def whole(batch: Any) -> tuple[Tensor, Tensor]:
            losses, numbers = parallel(batch)
            return losses.sum(), numbers.sum(dim=0)

        self._module = whole
