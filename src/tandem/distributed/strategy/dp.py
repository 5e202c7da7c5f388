"""nn.DataParallel: one process and all its GPUs, with a thread per GPU. Its limits are logged once."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.data.batch_shares import apportion
from tandem.data.loader import batch_size_of, parts_of, to_device
from tandem.data.seeds import derive_seed
from tandem.distributed.group import ProcessGroup
from tandem.distributed.strategy.base import Strategy
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")


class DPStrategy(Strategy):
    """Splits the batch of a single process over the GPUs; the first GPU has the weights and the optimizer."""

    has_one_device = True

    def __init__(self, group: ProcessGroup, exchange: ExchangeConfig, compute: ComputeConfig) -> None:
        super().__init__(group, exchange, compute)
        self._first_share = compute.dp_first_share
        self._devices = list(range(torch.cuda.device_count())) if group.device.type == "cuda" else []

    def check(self, group: ProcessGroup) -> None:
        if group.size > 1:
            raise ConfigError(
                f"--strategy dp trains in one process with all its GPUs, but there are {group.size} ranks; "
                "use --nproc 1 on one node, or --strategy ddp"
            )

    def wrap(self, module: nn.Module, slots: int) -> None:
        log.warning("%s", limits(self._devices, self._first_share))
        if len(self._devices) < 2:
            self._module = module
            return
        parallel = Balanced(_Gatherable(module), self._devices, self._first_share)

        def whole(batch: Any) -> tuple[Tensor, Tensor]:
            for device in self._devices[1:]:  # the step has seeded only the first GPU
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(derive_seed(torch.initial_seed(), device))
            losses, numbers = parallel(batch)
            return losses.sum(), numbers.sum(dim=0)

        self._module = whole


class Balanced(nn.DataParallel):  # type: ignore[type-arg]
    """DataParallel with a smaller share of each batch for the first GPU, which also gathers and updates."""

    def __init__(self, module: nn.Module, devices: Sequence[int], first_share: float) -> None:
        super().__init__(module, device_ids=list(devices))
        self._first_share = first_share

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any] | None, devices: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Split a batch, the only argument, over the GPUs; with too few samples, some get none."""
        (batch,) = inputs
        sizes = shares_of_devices(batch_size_of(batch), len(devices), self._first_share)
        parts = zip(parts_of(batch, sizes), devices, strict=False)
        scattered = [(to_device(part, torch.device("cuda", device)),) for part, device in parts]
        return scattered, [kwargs or {}] * len(scattered)


class _Gatherable(nn.Module):
    """The training module with one-dimensional outputs, which DataParallel concatenates over all GPUs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        loss, numbers = self.module(batch)
        return loss.reshape(1), numbers.reshape(1, -1)


def shares_of_devices(samples: int, devices: int, first_share: float) -> tuple[int, ...]:
    """Return the samples per GPU: the first gets `first_share` of the others' work, and none gets zero.

    With fewer samples than GPUs, the last GPUs are not used.
    """
    used = min(samples, devices)
    return apportion(samples, [first_share] + [1.0] * (used - 1))


def limits(devices: Sequence[int], first_share: float) -> str:
    """Return one line about what this strategy does here, and its limits."""
    if len(devices) < 2:
        found = "1 GPU" if devices else "no GPU"
        return (
            f"--strategy dp: nn.DataParallel splits a batch over GPUs, but there is {found} here, so nothing "
            "is split; this run computes the same as --strategy single"
        )
    return (
        f"--strategy dp: one process drives {len(devices)} GPUs with threads that share the Python GIL; "
        f"every step copies the weights to all GPUs and the gradients back to the first, which gets "
        f"{first_share:g} of another GPU's work; BatchNorm's running statistics are the first GPU's only; "
        "--strategy ddp has none of these limits"
    )
