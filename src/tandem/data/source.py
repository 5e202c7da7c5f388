"""The interface between the loop and all kinds of data.

The position is simply the global step. An implementation returns the micro-batches of any range of steps,
equal for any number of ranks, and adds to a checkpoint only state that the step does not determine. The
implementations are in `implementations.py`; `kinds.py` selects one.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tandem.config.slices import DataConfig
from tandem.data.batch_shares import check_even, given_shares
from tandem.data.fetch import Collate
from tandem.data.loader import loader_processes
from tandem.data.sampler import GlobalOrder, TrainBatches


@dataclass
class BatchReader:
    """How one rank of `world_size` reads data: in batches as in `config`, onto `device`.

    `sizes`: samples of each rank in a global batch; empty: equal. A result of `cut` keeps the sizes from its
    creation.
    """

    config: DataConfig
    seed: int
    rank: int
    world_size: int
    collate: Collate | None
    device: torch.device
    gather: Callable[[int], list[int]] | None = None
    """Gathers one number per rank on all ranks; needed for data that has a part per rank."""
    cores: int = 1
    """The number of CPUs available to this rank, for `--workers auto`."""
    sizes: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        config = self.config
        if config.batch_shares is not None:
            self.sizes = given_shares(
                config.batch_shares, config.batch_size, self.world_size, config.micro_batch_size
            )

    @property
    def workers(self) -> int:
        """The number of loader processes of this rank, for data that is read sample by sample."""
        return loader_processes(self.config.workers, self.cores)

    def cut(self, order: GlobalOrder, start: int, stop: int) -> TrainBatches:
        """Return this rank's share of the steps of `order`."""
        return TrainBatches(
            order, self.rank, self.world_size, self.config.micro_batch_size, start, stop, self.sizes
        )

    def check_shares(self) -> None:
        """Raise ConfigError if the batch does not divide evenly among the ranks, unless shares are set.

        A new run calls this. A resumed run may have shares that differ by one.
        """
        if self.config.batch_shares is None:
            check_even(self.config.batch_size, self.world_size)


class TrainingData(Protocol):
    """Batches by global step."""

    order: GlobalOrder
    """The number of samples and steps in an epoch."""

    def steps(self, start: int, stop: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches, on its device, for each step from `start` to before `stop`.

        A micro-batch is None if this rank has no samples for it.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """Return extra state needed to continue after the last yielded step; usually empty."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state` after the step before the next one requested from `steps`."""
        ...
