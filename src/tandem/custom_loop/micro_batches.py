"""Split a batch into several backward passes whose gradients add up to those of the whole batch."""

from collections.abc import Iterator
from typing import Any

from tandem.custom_loop.backward import Backward
from tandem.data.loader import batch_size_of, parts_of
from tandem.data.seeds import seed_micro_step
from tandem.errors import ConfigError


class MicroBatches:
    """Track which part of the batch the script is at.

    `share` is this rank's number of samples relative to an equal share.
    """

    def __init__(self, seed: int, rank: int, backward: Backward) -> None:
        self._seed = seed
        self._rank = rank
        self._backward = backward
        self.share = 1.0
        self._part_of_batch = 1.0
        self.is_last = True

    @property
    def weight(self) -> float:
        """The weight of the next loss, so that the mean over ranks is the mean over all samples."""
        return self.share * self._part_of_batch

    def of(self, batch: Any, count: int, step: int) -> Iterator[Any]:
        """Yield the parts. Raises ConfigError if `batch` has fewer than `count` samples."""
        size = batch_size_of(batch)
        if not 1 <= count <= size:
            raise ConfigError(
                f"run.parts(batch, {count}): invalid value {count}; expected 1 to {size}, "
                "the samples of the batch"
            )
        try:
            sizes = [size // count + (number < size % count) for number in range(count)]
            for number, part in enumerate(parts_of(batch, sizes)):
                self._part_of_batch = sizes[number] / size
                self.is_last = number == count - 1
                self._backward.exchange_with_next(self.is_last)
                seed_micro_step(self._seed, step, number, self._rank)
                yield part
        finally:
            # The script may leave its loop over the parts early, and its next backward pass is for a whole
            # batch.
            self._part_of_batch = 1.0
            self.is_last = True
            self._backward.exchange_with_next(True)
