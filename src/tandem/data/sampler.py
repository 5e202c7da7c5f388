"""The samples of each step: a function of (seed, step) only, for any number of ranks.

An epoch is floor(n / B) full global batches of the epoch's permutation; the remainder is dropped. The
position in the data is simply the global step, so a resumed run seeks in O(1).

torch draws the order of a small set, once per epoch. The order of a set of LARGE samples or more is not
stored: each rank computes its own samples of the next steps (`Permutation`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.data.batch_shares import equal_shares, slice_of
from tandem.data.seeds import FIRST, GOLDEN, SECOND, derive_seed, derive_seeds
from tandem.errors import ConfigError
from tandem.log import pluralize

# A permutation of range(n) that is computed, not stored: any position at any time, in both directions.
#
# A Feistel network permutes the numbers of a few bits, whatever its round function is. A number that leaves
# range(n) is permuted again until it returns (cycle walking). From 100 numbers on, statistical tests find no
# difference between six rounds and torch.randperm. With fewer numbers, the differences of neighbors are
# uneven.

Numbers = NDArray[Any]
ROUNDS = 6
"""An even number, so that both halves have their original width at the end."""
BLOCK = 2**14
"""Numbers computed at once; with all intermediate results, they take less than 1 MB."""


class Permutation:
    """One permutation of range(n), 1 <= n <= 2**62, for each `key` (an integer >= 0)."""

    def __init__(self, n: int, key: int) -> None:
        bits = max(2, (n - 1).bit_length())
        self.n = n
        self._widths = bits // 2, bits - bits // 2
        self._keys = [numpy.uint64(derive_seed(key, number)) for number in range(ROUNDS)]

    def at(self, positions: Numbers) -> Numbers:
        """Return the numbers at `positions`, int64 in the same shape. Raises IndexError outside range(n)."""
        return self._walked(positions, self._forward)

    def inverse(self, numbers: Numbers) -> Numbers:
        """Return the positions of `numbers`; otherwise like `at`."""
        return self._walked(numbers, self._backward)

    def _walked(self, values: Numbers, once: Callable[[Numbers], Numbers]) -> Numbers:
        flat = numpy.asarray(values, dtype=numpy.int64).reshape(-1)
        # A number from outside might never reach range(n).
        if len(flat) and (flat.min() < 0 or flat.max() >= self.n):
            raise IndexError(f"a number is outside of range({self.n})")
        result = numpy.empty_like(flat)
        for start in range(0, len(flat), BLOCK):
            block = once(flat[start : start + BLOCK].view(numpy.uint64))
            outside = numpy.flatnonzero(block >= self.n)
            while len(outside):
                moved = once(block[outside])
                block[outside] = moved
                outside = outside[moved >= self.n]
            result[start : start + BLOCK] = block.view(numpy.int64)
        return result.reshape(numpy.shape(values))

    def _forward(self, values: Numbers) -> Numbers:
        high, low = self._widths
        left, right = halves(values, low)
        for key in self._keys:
            left, right = right, left ^ mixed(right, key, high)
            high, low = low, high
        return left << numpy.uint64(low) | right

    def _backward(self, values: Numbers) -> Numbers:
        high, low = self._widths
        left, right = halves(values, low)
        for key in reversed(self._keys):
            high, low = low, high
            left, right = right ^ mixed(left, key, high), left
        return left << numpy.uint64(low) | right


def halves(values: Numbers, low: int) -> tuple[Numbers, Numbers]:
    """Return the bits above the lowest `low` bits, and the lowest ones."""
    return values >> numpy.uint64(low), values & numpy.uint64((1 << low) - 1)


def mixed(values: Numbers, key: numpy.uint64 | Numbers, bits: int) -> Numbers:
    """Return `bits` bits of each value's hash with `key`: products spread upward, so the top bits count."""
    hashes = values ^ key
    hashes *= numpy.uint64(FIRST)
    hashes ^= hashes >> numpy.uint64(32)
    hashes *= numpy.uint64(SECOND)
    hashes ^= hashes >> numpy.uint64(29)
    hashes *= numpy.uint64(GOLDEN)
    hashes >>= numpy.uint64(64 - bits)
    return hashes


BatchKey = tuple[int, list[int], int | None]
"""(epoch, indices, step): with the seed, this determines a batch. The step is None in an evaluation."""
LARGE = 1_000_000
"""Sets of at least this size have a computed order. Below it, torch takes 10 ms and 8 MB for an epoch."""
STEPS_AT_ONCE = 64
"""Steps whose samples are computed together: a NumPy call costs as much as a few hundred samples."""
TORCH = "torch"
FEISTEL = "feistel"


class GlobalOrder:
    """The order of all samples over all epochs, divided into global batches.

    Args: n: samples in the training set. batch_size: global batch, over all ranks.

    Raises ConfigError if the set is smaller than one batch.
    """

    contiguous = False
    """Whether equal shares of a batch are also contiguous, because neighbors are read together."""
    fingerprint = ""
    """Identifies the other inputs of the order; manifests record it."""

    def __init__(self, n: int, batch_size: int, seed: int) -> None:
        if batch_size < 1:
            raise ConfigError(f"--batch-size: invalid value {batch_size}; expected an integer >= 1")
        if n < 1:
            raise ConfigError("the training set has no samples; check its path or filter")
        if n < batch_size:
            raise ConfigError(
                f"the training set has {pluralize(n, 'sample')}, less than one global batch of {batch_size}: "
                f"use --batch-size {n}{' or less' * (n > 1)}"
            )
        self.n = n
        self.batch_size = batch_size
        self.seed = seed
        self.steps_per_epoch = n // batch_size
        self.algorithm = TORCH if n < LARGE else FEISTEL
        """The algorithm of the order. Manifests record it, because a position refers to this order."""
        self._cached: tuple[int, Tensor] | None = None
        self._ahead: tuple[tuple[int, int, range], Tensor] | None = None

    def samples(self, step: int) -> int:
        """Return the samples of all ranks in a step."""
        return self.batch_size

    def samples_before(self, step: int) -> int:
        """Return the samples of all ranks in all steps before `step`."""
        return step * self.batch_size

    def batch(self, step: int) -> tuple[int, Tensor]:
        """Return the 0-based epoch and the int64 indices [B] of the global batch of 0-based step `step`."""
        return self.indices(step, slice(None))

    def indices(self, step: int, positions: slice) -> tuple[int, Tensor]:
        """Return the epoch, and the dataset indices at `positions` of the step's global batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.algorithm == TORCH:
            start = position * self.batch_size
            return epoch, self._permutation(epoch)[start : start + self.batch_size][positions].long()
        own = range(self.batch_size)[positions]
        steps = min(STEPS_AT_ONCE, max(1, BLOCK // max(1, len(own))))
        first = position - position % steps
        key = (epoch, first, own)
        if self._ahead is None or self._ahead[0] != key:
            begins = numpy.arange(first, min(first + steps, self.steps_per_epoch)) * self.batch_size
            of_batch = numpy.arange(own.start, own.stop, own.step)
            self._ahead = key, self._computed(epoch, begins[:, None] + of_batch)
        return epoch, self._ahead[1][position - first]

    def describe(self) -> tuple[str, bool]:
        """Return a message about the order, and whether it is a warning; ("", False) for a plain shuffle."""
        return "", False

    def at(self, epoch: int, positions: Numbers) -> Tensor:
        """Return the int64 indices at `positions` of an epoch, in the same shape."""
        if self.algorithm == TORCH:
            return self._permutation(epoch)[torch.from_numpy(positions)].long()
        return self._computed(epoch, positions)

    def _computed(self, epoch: int, positions: Numbers) -> Tensor:
        """Return the same as `at`, without the rest of the epoch's order."""
        return torch.from_numpy(Permutation(self.n, derive_seed(self.seed, epoch)).at(positions))

    def _permutation(self, epoch: int) -> Tensor:
        if self._cached is None or self._cached[0] != epoch:
            self._cached = None  # free the old order first: for 1,000,000,000 samples, each takes 4 GB
            self._cached = epoch, self._drawn(epoch)
        return self._cached[1]

    def _drawn(self, epoch: int) -> Tensor:
        """Return all indices of an epoch in order, int32 or int64; only those of full batches are used."""
        generator = torch.Generator().manual_seed(derive_seed(self.seed, epoch))
        large = LARGE <= self.n <= torch.iinfo(torch.int32).max  # the same order in half the memory
        return torch.randperm(self.n, generator=generator, dtype=torch.int32 if large else torch.int64)


class TrainBatches:
    """This rank's micro-batches of the steps from `start_step` to before `stop_step`, in order.

    Every rank has the same number of micro-batches per step, none empty, so that collectives inside a forward
    pass match. A share is divided evenly: 10 samples with a micro-batch of 7 become 5 and 5. Only with uneven
    shares and a micro-batch of 1 can a micro-batch have one sample more than requested.

    `sizes`: samples of each rank in every step (`batch_shares.py`); None: equal, up to a difference of one.
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
        self.positions = slice_of(sizes, rank, order.contiguous)
        """The positions of this rank's samples in a global batch."""
        self.share_size = sizes[rank]
        """Samples of this rank in every step."""
        self.before_step: Callable[[int], None] | None = None
        """Called with each step before its samples are requested, in the process that requests them."""
        self._micro_steps = 1
        if micro_batch_size is not None:
            # The largest share sets the count, and the smallest limits it: no micro-batch may be empty.
            self._micro_steps = min(-(-max(sizes) // micro_batch_size), min(sizes))

    def micro_steps(self, step: int) -> int:
        """Return the number of micro-batches in a step; the same on every rank."""
        return self._micro_steps

    def micro_sizes(self, step: int) -> list[int]:
        """Return the number of samples in each of this rank's micro-batches of a step."""
        size, rest = divmod(self.share_size, self._micro_steps)
        # Split like tensor_split: the first parts get the extra samples.
        return [size + (i < rest) for i in range(self._micro_steps)]

    def micro_batches(self) -> Iterator[tuple[int, Tensor]]:
        """Return (epoch, int64 indices) for each micro-batch."""
        return ((epoch, indices) for epoch, indices, _ in self._parts())

    def _parts(self) -> Iterator[tuple[int, Tensor, int]]:
        for step in range(self.start_step, self.stop_step):
            if self.before_step is not None:
                self.before_step(step)
            epoch, share = self.order.indices(step, self.positions)
            for part in share.tensor_split(self._micro_steps) if self._micro_steps > 1 else (share,):
                yield epoch, part, step

    def __iter__(self) -> Iterator[BatchKey]:
        return ((epoch, indices.tolist(), step) for epoch, indices, step in self._parts())

    def __len__(self) -> int:
        return max(0, self.stop_step - self.start_step) * self._micro_steps


# Orders by the weights or lengths of samples; like the plain shuffle, functions of (seed, step).

MakeOrder = Callable[[int, int, int], GlobalOrder]
"""(samples, global batch, seed) -> order."""
POOL_BATCHES = 50
"""Samples of this many global batches are sorted by length together: still random, with little padding."""
SPLITMIX = "splitmix64"
BATCHES = 2  # the last part of a seed for the order of batches
DRAWS = 3  # the same, for samples that are drawn by weight: one number for each position


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

    def _computed(self, epoch: int, positions: Numbers) -> Tensor:
        seeds = derive_seeds(derive_seed(self.seed, epoch, 0, DRAWS), torch.from_numpy(positions))
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
