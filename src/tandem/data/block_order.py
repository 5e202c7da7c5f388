"""The order of samples that are stored in blocks: each once per epoch, read from few blocks at a time.

In each epoch, the blocks are permuted and laid end to end. The line is cut into lanes of equal length, which
are read in parallel: each global batch has equally many samples from every lane. In a lane, samples are
shuffled within windows of a few blocks. A batch is ordered by lanes: a rank with a contiguous share of it
reads few lanes, and a node only their blocks.

The whole order is a function of (seed, epoch, position). The memory is proportional to the number of blocks:
at most 60 bytes for each.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from tandem.data.sampler import GlobalOrder, Numbers, Permutation, halves, mixed
from tandem.data.seeds import derive_seed, derive_seeds

LANES = 64
"""Divisible by common numbers of nodes. With 64 lanes, 16 nodes share only blocks at the borders of lanes."""
WINDOW = 4
"""Blocks that are shuffled together in a lane, so up to 256 blocks are mixed in all."""
FEW_LANES = 16
"""With fewer lanes, batches show the classes of a sorted dataset (docs/large-datasets.md)."""
BLOCKS = "blocks"
BLOCK_KEY = 4  # the last part of a seed for the order of blocks
WINDOW_KEY = 5  # the same, for the order within windows
ROUND_KEY = 6
WINDOW_ROUNDS = 8
"""An even number. Windows may be smaller than 100 samples, for which six rounds are uneven."""


VALID_SIZES = "return the number of samples of each block, in order: integers >= 1"


def checked_sizes(sizes: Any, samples: int) -> Numbers:
    """Return the sizes of blocks as int64 [blocks].

    Raises ValueError, which describes them, unless they are integers >= 1 that add up to `samples`.
    """
    try:
        made = numpy.asarray(sizes)
    except (TypeError, ValueError):
        made = numpy.empty(0, dtype=object)
    if made.ndim != 1 or made.dtype.kind not in "iu" or not len(made):
        raise ValueError(f"an object of type {type(sizes).__name__}")
    numbers: Numbers = made.astype(numpy.int64)
    if numbers.min() < 1:
        raise ValueError(f"a block of {numbers.min()} samples")
    if (total := int(numbers.sum())) != samples:
        raise ValueError(f"blocks of {total:,} samples in all, for a dataset of {samples:,}")
    return numbers


def lanes_of(batch_size: int, blocks: int) -> int:
    """Return the largest number of lanes that divides the batch, at most LANES and one for each block."""
    return next(lanes for lanes in range(min(LANES, blocks), 0, -1) if batch_size % lanes == 0)


class _Layout(NamedTuple):
    """The blocks of one epoch, laid end to end; a position counts samples along this line."""

    blocks: Numbers
    """Block numbers in the order of the line."""
    ends: Numbers
    """The position after each of them."""
    borders: Numbers
    """Positions at which windows begin, and the end of the last one."""
    keys: Numbers
    """One for each window."""


class BlockOrder(GlobalOrder):
    """Each sample once per epoch, in global batches of samples from few blocks.

    `sizes`: the number of samples of each block, in order. Raises ValueError as `checked_sizes`.
    """

    contiguous = True

    def __init__(self, n: int, batch_size: int, seed: int, sizes: Sequence[int] | Numbers) -> None:
        super().__init__(n, batch_size, seed)
        self.sizes = checked_sizes(sizes, n)
        self.algorithm = BLOCKS
        digest = hashlib.sha256(self.sizes.astype("<i8").tobytes()).hexdigest()
        self.fingerprint = f"{len(self.sizes)}:{digest[:16]}"
        self.lanes = lanes_of(batch_size, len(self.sizes))
        self.share_of_lane = batch_size // self.lanes
        """Samples of each lane in a global batch."""
        self._stops = self.sizes.cumsum()
        self._lane_size = self.steps_per_epoch * self.share_of_lane
        self._layouts: dict[int, _Layout] = {}

    def describe(self) -> tuple[str, bool]:
        count = len(self.sizes)
        text = f"data in {count:,} blocks: {self.lanes} read in parallel, shuffled in windows of {WINDOW}"
        if self.lanes >= FEW_LANES or count <= FEW_LANES * WINDOW:
            return text, False
        return f"{text}; samples mix better with --batch-size a multiple of {LANES} or of {FEW_LANES}", True

    def open_blocks(self, positions: slice) -> int:
        """Return how many blocks are read at a time for the samples at `positions` of a batch."""
        # A batch may end one window and begin the next, but lanes rarely do so together.
        return len(self._lanes_at(positions)) * (WINDOW + 1)

    def blocks(self, start: int, stop: int, positions: slice) -> list[int]:
        """Return the blocks with samples at `positions` of the global steps from `start` to before `stop`.

        They are in the order of their first use. A few of them may be unused.
        """
        needed: dict[int, None] = {}
        while start < stop:
            epoch, first = divmod(start, self.steps_per_epoch)
            steps = min(stop - start, self.steps_per_epoch - first)
            needed.update(dict.fromkeys(self._needed(epoch, first, first + steps, positions)))
            start += steps
        return list(needed)

    def _lanes_at(self, positions: slice) -> range:
        own = range(self.batch_size)[positions]
        return range(own[0] // self.share_of_lane, own[-1] // self.share_of_lane + 1)

    def _needed(self, epoch: int, first: int, stop: int, positions: slice) -> list[int]:
        """Return all blocks of the windows that these lanes read in steps [first, stop) of an epoch."""
        layout = self._layout(epoch)
        starts = numpy.asarray(self._lanes_at(positions)) * self._lane_size
        begins = starts + first * self.share_of_lane
        ends = starts + stop * self.share_of_lane
        windows = _ranges(_found(layout.borders, begins) - 1, _found(layout.borders, ends - 1))
        lanes = layout.borders[windows] // self._lane_size
        # A window that is already open comes first.
        since = numpy.maximum(layout.borders[windows] - lanes * self._lane_size, first * self.share_of_lane)
        windows = windows[since.argsort(kind="stable")]
        from_block = _found(layout.ends, layout.borders[windows])
        to_block = _found(layout.ends, layout.borders[windows + 1] - 1) + 1
        needed: list[int] = layout.blocks[_ranges(from_block, to_block)].tolist()
        return needed

    def _computed(self, epoch: int, positions: Numbers) -> Tensor:
        layout = self._layout(epoch)
        step, place = numpy.divmod(positions, self.batch_size)
        lane, offset = numpy.divmod(place, self.share_of_lane)
        line = lane * self._lane_size + step * self.share_of_lane + offset
        window = _found(layout.borders, line) - 1
        begin = layout.borders[window]
        shuffled = begin + _permuted(
            line - begin, layout.borders[window + 1] - begin, layout.keys[window], self._round_keys(epoch)
        )
        found = _found(layout.ends, shuffled)
        return torch.from_numpy(shuffled + self._stops[layout.blocks[found]] - layout.ends[found])

    def _round_keys(self, epoch: int) -> list[int]:
        return [derive_seed(self.seed, epoch, number, ROUND_KEY) for number in range(WINDOW_ROUNDS)]

    def _layout(self, epoch: int) -> _Layout:
        if epoch not in self._layouts:
            # Reading ahead needs the next epoch while the current one is in use.
            self._layouts = {key: each for key, each in self._layouts.items() if abs(key - epoch) == 1}
            self._layouts[epoch] = self._laid_out(epoch)
        return self._layouts[epoch]

    def _laid_out(self, epoch: int) -> _Layout:
        count = len(self.sizes)
        blocks = Permutation(count, derive_seed(self.seed, epoch, 0, BLOCK_KEY)).at(numpy.arange(count))
        ends = self.sizes[blocks].cumsum()
        borders = numpy.concatenate([*self._borders(ends), [self.lanes * self._lane_size]])
        windows = torch.arange(len(borders) - 1)
        keys = derive_seeds(derive_seed(self.seed, epoch, 0, WINDOW_KEY), windows).numpy()
        return _Layout(blocks, ends, borders, keys.view(numpy.uint64))

    def _borders(self, ends: Numbers) -> Iterator[Numbers]:
        """Return the positions at which the windows of each lane begin."""
        for lane in range(self.lanes):
            begin = lane * self._lane_size
            # A lane may begin and end inside a block.
            first, last = _found(ends, numpy.array([begin, begin + self._lane_size - 1])).tolist()
            yield numpy.concatenate([[begin], ends[first + WINDOW - 1 : last : WINDOW]])


def _found(borders: Numbers, values: Numbers) -> Numbers:
    """Return the number of borders that are at most each value."""
    found: Numbers = numpy.searchsorted(borders, values, side="right")
    return found


def _ranges(starts: Numbers, stops: Numbers) -> Numbers:
    """Return all numbers of range(start, stop) for each pair, one after another."""
    counts = stops - starts
    before = counts.cumsum() - counts
    numbers: Numbers = numpy.arange(int(counts.sum())) + numpy.repeat(starts - before, counts)
    return numbers


def _permuted(places: Numbers, sizes: Numbers, keys: Numbers, rounds: Sequence[int]) -> Numbers:
    """Return the permuted position of each place in range(size), with its key; all in the same shape.

    No element depends on another. The network is that of `sampler.Permutation`, with a key for each element.
    """
    flat_places = places.reshape(-1).astype(numpy.uint64)
    flat_sizes = sizes.reshape(-1).astype(numpy.uint64)
    flat_keys = keys.reshape(-1)
    # frexp returns the number of bits of an integer below 2**53.
    bits = numpy.maximum(2, numpy.frexp((flat_sizes - numpy.uint64(1)).astype(numpy.float64))[1])
    for width in numpy.flatnonzero(numpy.bincount(bits)).tolist():
        rest = numpy.flatnonzero(bits == width)
        while len(rest):
            moved = network(flat_places[rest], flat_keys[rest], width, rounds)
            flat_places[rest] = moved
            rest = rest[moved >= flat_sizes[rest]]
    return flat_places.view(numpy.int64).reshape(places.shape)


def network(values: Numbers, keys: Numbers, bits: int, rounds: Sequence[int]) -> Numbers:
    """Permute numbers of a few bits, uint64, each by its key; needs an even number of rounds."""
    high, low = bits // 2, bits - bits // 2
    left, right = halves(values, low)
    for number in rounds:
        left, right = right, left ^ mixed(right, keys ^ numpy.uint64(number), high)
        high, low = low, high
    return left << numpy.uint64(low) | right


AHEAD = 64
"""Steps from the announcement of a block to its use: at least this many, at most twice as many."""


class ReadAhead:
    """Announces to a BlockSource the blocks that a rank needs in its next steps; called with each step."""

    def __init__(self, source: Any, order: Any, positions: slice, start: int, stop: int) -> None:
        self._source = source
        self._order = order
        self._positions = positions
        self._announced = start
        self._stop = stop
        self._last: set[int] = set()

    def __call__(self, step: int) -> None:
        """Announce new blocks up to 2 * AHEAD steps from `step`."""
        if self._announced - step >= AHEAD or self._announced >= self._stop:
            return
        until = min(step + 2 * AHEAD, self._stop)
        blocks = self._order.blocks(self._announced, until, self._positions)
        new = [block for block in blocks if block not in self._last]
        self._announced = until
        self._last = set(blocks)
        if new:
            self._source.will_need(new)
