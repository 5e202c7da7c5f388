"""Which samples make which step: a function of (seed, step) alone, whatever the number of ranks.

An epoch is floor(n / B) full global batches of that epoch's permutation; the rest of it is left out. The
position in the data is the global step and nothing else, so a resumed run seeks in O(1).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tandem.data.seeds import derive_seed
from tandem.data.shares import equal_shares, places
from tandem.errors import ConfigError

BatchKey = tuple[int, list[int], int | None]
"""(epoch, indices, step): with the run's seed, all that decides a batch; no step: an evaluation."""
LARGE = 10_000_000
"""Samples from which on the memory of an epoch's order counts for more than a conversion in each step."""


class GlobalOrder:
    """The order of all samples over all epochs, cut into global batches.

    Args: n: samples in the training set. batch_size: global batch, over all ranks.
    Raises ConfigError if the set is smaller than one batch.
    """

    def __init__(self, n: int, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"--batch-size: invalid value {batch_size}; expected an integer >= 1")
        if n < batch_size:
            raise ConfigError(
                f"the training set has {n} samples, less than one global batch of {batch_size}: "
                f"use --batch-size {max(n, 1)} or less"
            )
        self.n = n
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = n // batch_size
        self._cached: tuple[int, Tensor] | None = None

    def samples(self, step: int) -> int:
        """Of all ranks in a step."""
        return self.batch_size

    def samples_before(self, step: int) -> int:
        """Of all ranks in all steps before `step`."""
        return step * self.batch_size

    def batch(self, step: int) -> tuple[int, Tensor]:
        """The epoch (0-based) and the int64 indices [B] of the global batch of 0-based global step `step`."""
        epoch, position = divmod(step, self.steps_per_epoch)
        start = position * self.batch_size
        return epoch, self._permutation(epoch)[start : start + self.batch_size].long()

    def _permutation(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = None  # at 1,000,000,000 samples a second order would be 4 GB more
            self._cached = epoch, self._drawn(epoch)
        return self._cached[1]

    def _drawn(self, epoch: int) -> Tensor:
        """The indices of an epoch in their order, int32 or int64, of which those of full batches count."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        large = LARGE <= self.n <= torch.iinfo(torch.int32).max  # the same order in half the memory
        return torch.randperm(self.n, generator=generator, dtype=torch.int32 if large else torch.int64)


class TrainBatches:
    """This rank's micro-batches of the steps `start_step` (included) to `stop_step` (left out), in order.

    Every rank makes the same number of micro-batches a step, none of them empty, so that collectives inside
    a forward pass match. A share is cut evenly: 10 samples with a micro-batch of 7 give 5 and 5. Only where
    shares are uneven and the micro-batch is 1 can a micro-batch have one sample more than asked for.
    `sizes`: samples of each rank in every step, see `shares.py`; None: equal, they differ by at most one.
    Raises ConfigError if there are more ranks than samples in a batch.
    """

    def __init__(
        self,
        order: GlobalOrder,
        rank: int,
        world_size: int,
        micro_batch_size: int | None,
        start_step: int,
        stop_step: int,
        sizes: Sequence[int] | None = None,
    ) -> None:
        sizes = sizes or equal_shares(order.batch_size, world_size)
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ConfigError(
                f"--micro-batch-size: invalid value {micro_batch_size}; expected an integer >= 1"
            )
        self.order = order
        self.start_step = start_step
        self.stop_step = stop_step
        self.places = places(sizes, rank)
        """This rank's part of a global batch."""
        self.share_size = sizes[rank]
        """Samples of this rank in every step."""
        self._micro_steps = 1
        if micro_batch_size is not None:
            self._micro_steps = min(-(-max(sizes) // micro_batch_size), min(sizes))

    def micro_steps(self, step: int) -> int:
        """Micro-batches that make up step `step`; the same on every rank."""
        return self._micro_steps

    def micro_sizes(self, step: int) -> list[int]:
        """Samples in each of this rank's micro-batches of step `step`."""
        size, rest = divmod(self.share_size, self._micro_steps)
        return [size + (i < rest) for i in range(self._micro_steps)]

    def micro_batches(self) -> Iterator[tuple[int, Tensor]]:
        """(epoch, int64 indices) of each micro-batch."""
        return ((epoch, indices) for epoch, indices, _ in self._parts())

    def _parts(self) -> Iterator[tuple[int, Tensor, int]]:
        for step in range(self.start_step, self.stop_step):
            epoch, batch = self.order.batch(step)
            share = batch[self.places]
            for part in share.tensor_split(self._micro_steps) if self._micro_steps > 1 else (share,):
                yield epoch, part, step

    def __iter__(self) -> Iterator[BatchKey]:
        return ((epoch, indices.tolist(), step) for epoch, indices, step in self._parts())

    def __len__(self) -> int:
        return max(0, self.stop_step - self.start_step) * self._micro_steps
