"""The samples of each step: a function of (seed, step) only, for any number of ranks.

An epoch is floor(n / B) full global batches of the epoch's permutation; the remainder is dropped. The
position in the data is just the global step, so a resumed run seeks in O(1).

torch draws the order of a small set, once per epoch. The order of a set of LARGE samples or more is not
stored: each rank computes its own samples of the next steps (`permutation.py`).
"""

from collections.abc import Iterator, Sequence

import numpy
import torch
from torch import Tensor

from tandem.data.batch_shares import equal_shares, slice_of
from tandem.data.permutation import BLOCK, Numbers, Permutation
from tandem.data.seeds import derive_seed
from tandem.errors import ConfigError

BatchKey = tuple[int, list[int], int | None]
"""(epoch, indices, step): with the seed, this determines a batch. The step is None in an evaluation."""
LARGE = 1_000_000
"""Number of samples from which an order is computed. Below, torch takes 10 ms and 8 MB for an epoch."""
STEPS_AT_ONCE = 64
"""Compute the samples of so many steps together: NumPy's calls cost as much as a few hundred samples."""
TORCH = "torch"
FEISTEL = "feistel"


class GlobalOrder:
    """The order of all samples over all epochs, divided into global batches.

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
        self.algorithm = TORCH if n < LARGE else FEISTEL
        """What the order is made with. Manifests record it, because a position refers to this order."""
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

    def indices(self, step: int, places: slice) -> tuple[int, Tensor]:
        """Return the epoch and only those indices that are at `places` of the global batch."""
        epoch, position = divmod(step, self.steps_per_epoch)
        if self.algorithm == TORCH:
            start = position * self.batch_size
            return epoch, self._permutation(epoch)[start : start + self.batch_size][places].long()
        mine = range(self.batch_size)[places]
        steps = min(STEPS_AT_ONCE, max(1, BLOCK // max(1, len(mine))))
        first = position - position % steps
        key = (epoch, first, mine)
        if self._ahead is None or self._ahead[0] != key:
            begins = numpy.arange(first, min(first + steps, self.steps_per_epoch)) * self.batch_size
            of_batch = numpy.arange(mine.start, mine.stop, mine.step)
            self._ahead = key, self._computed(epoch, begins[:, None] + of_batch)
        return epoch, self._ahead[1][position - first]

    def _computed(self, epoch: int, places: Numbers) -> Tensor:
        """Return the indices at `places` of an epoch, without the rest of its order."""
        return torch.from_numpy(Permutation(self.n, derive_seed(self.seed, epoch)).at(places))

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
        self.places = slice_of(sizes, rank)
        """The positions of this rank's samples in a global batch."""
        self.share_size = sizes[rank]
        """Samples of this rank in every step."""
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
        # The same split as tensor_split: the first parts get the extra samples.
        return [size + (i < rest) for i in range(self._micro_steps)]

    def micro_batches(self) -> Iterator[tuple[int, Tensor]]:
        """Return (epoch, int64 indices) for each micro-batch."""
        return ((epoch, indices) for epoch, indices, _ in self._parts())

    def _parts(self) -> Iterator[tuple[int, Tensor, int]]:
        for step in range(self.start_step, self.stop_step):
            epoch, share = self.order.indices(step, self.places)
            for part in share.tensor_split(self._micro_steps) if self._micro_steps > 1 else (share,):
                yield epoch, part, step

    def __iter__(self) -> Iterator[BatchKey]:
        return ((epoch, indices.tolist(), step) for epoch, indices, step in self._parts())

    def __len__(self) -> int:
        return max(0, self.stop_step - self.start_step) * self._micro_steps
