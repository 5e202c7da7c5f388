"""Orders by the weights or lengths of samples; like the plain shuffle, functions of (seed, step)."""

from collections.abc import Callable

import torch
from torch import Tensor

from tandem.data.permutation import Numbers
from tandem.data.sampler import TORCH, GlobalOrder
from tandem.data.seeds import derive_seed, derive_seeds

MakeOrder = Callable[[int, int, int], GlobalOrder]
"""(samples, global batch, seed) -> order."""
POOL_BATCHES = 50
"""Samples of this many global batches are sorted by length together: still random, with little padding."""
SPLITMIX = "splitmix64"
BATCHES = 2  # the last part of a seed for the order of batches
DRAWS = 3  # and of one for the samples that are drawn by weight, one number for each position


class WeightedOrder(GlobalOrder):
    """Each epoch draws samples with replacement, in proportion to their weights.

    `weights`: float64 [n], none below 0 and at least one above. The draw differs in each epoch.
    """

    def __init__(self, n: int, batch_size: int, seed: int, weights: Tensor) -> None:
        super().__init__(n, batch_size, seed)
        self._borders = weights.cumsum(0)
        if self.algorithm != TORCH:
            self.algorithm = SPLITMIX

    def _drawn(self, epoch: int) -> Tensor:
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        return self._hit(torch.rand(self.n, generator=generator, dtype=torch.float64))

    def _computed(self, epoch: int, places: Numbers) -> Tensor:
        seeds = derive_seeds(derive_seed(self.seed, epoch, 0, DRAWS), torch.from_numpy(places))
        return self._hit((seeds >> 10).double() / 2**53)

    def _hit(self, points: Tensor) -> Tensor:
        """Return the samples at `points` from 0 to 1, where each sample is as wide as its weight."""
        # torch.multinomial is limited to 2**24 categories.
        found = torch.searchsorted(self._borders, points * self._borders[-1], right=True)
        # With right=True, a sample of weight 0 is never drawn. Rounding can put a point on the last border.
        return found.clamp_(max=self.n - 1)


class BucketedOrder(GlobalOrder):
    """Each sample once per epoch, in global batches of samples with similar lengths.

    After a shuffle, the samples of every POOL_BATCHES batches are sorted by length; then all batches are
    shuffled. An epoch's order is always stored, in half the memory of the lengths.
    """

    def __init__(self, n: int, batch_size: int, seed: int, lengths: Tensor) -> None:
        super().__init__(n, batch_size, seed)
        self._lengths = lengths
        self.algorithm = TORCH

    def _drawn(self, epoch: int) -> Tensor:
        # The remainder is dropped before the samples are sorted; otherwise it would be the longest ones.
        shuffled = super()._drawn(epoch)[: self.steps_per_epoch * self.batch_size]
        pools = torch.split(shuffled, POOL_BATCHES * self.batch_size)
        ordered = torch.cat([pool[self._lengths[pool].argsort(stable=True)] for pool in pools])
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch, 0, BATCHES))
        batches = ordered.view(self.steps_per_epoch, self.batch_size)
        return batches[torch.randperm(self.steps_per_epoch, generator=generator)].flatten()
