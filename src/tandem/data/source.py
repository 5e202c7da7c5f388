"""What a run trains on, and where it stands: the seam between the loop and all kinds of data.

The position is the global step alone. An implementation gives out the micro-batches of any range of steps,
the same for any number of ranks, and adds to a checkpoint only what the step does not say. Each kind of data
is a file of its own (`mapped.py`, `streamed.py`); `kinds.py` chooses.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from tandem.config.slices import DataConfig
from tandem.data.fetch import Collate
from tandem.data.loader import loader_processes
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.shares import check_even, given_shares


@dataclass
class Reader:
    """Who reads, and how: one rank of `world_size`, in batches as `config` has them, onto `device`.

    `sizes`: samples of each rank in a global batch; empty: equal. What `cut` gives keeps those it was cut by.
    """

    config: DataConfig
    seed: int
    rank: int
    world_size: int
    collate: Collate | None
    device: torch.device
    gather: Callable[[int], list[int]] | None = None
    """A number of each rank's, on all ranks; for data of which ranks have parts of their own."""
    cores: int = 1
    """CPUs that this rank can count on: what `--workers auto` goes by."""
    sizes: tuple[int, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        config = self.config
        if config.batch_shares is not None:
            self.sizes = given_shares(
                config.batch_shares, config.batch_size, self.world_size, config.micro_batch_size
            )

    @property
    def workers(self) -> int:
        """Loader processes of this rank, for data that are loaded by the sample."""
        return loader_processes(self.config.workers, self.cores)

    def cut(self, order: GlobalOrder, start: int, stop: int) -> TrainBatches:
        """Its share of the steps of `order`."""
        return TrainBatches(
            order, self.rank, self.world_size, self.config.micro_batch_size, start, stop, self.sizes
        )

    def check_shares(self) -> None:
        """A fresh run gives ranks an equal share of a batch, unless told otherwise. Raises ConfigError."""
        if self.config.batch_shares is None:
            check_even(self.config.batch_size, self.world_size)


class TrainingData(Protocol):
    """Batches by global step."""

    order: GlobalOrder
    """Samples and steps of an epoch."""

    def steps(self, start: int, stop: int) -> Iterator[list[Any]]:
        """The reader's micro-batches, on its device, of each step from `start` to before `stop`.

        None in place of one that this rank has no sample for.
        """
        ...

    def state(self) -> Mapping[str, Any]:
        """What is to be saved besides the step to go on after the last step given out; often nothing."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave after the step before the one that `steps` is asked for next."""
        ...
