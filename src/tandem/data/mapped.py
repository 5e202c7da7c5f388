"""Map-style data (`__len__` and `__getitem__`), in tandem's own order."""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from tandem.data.fetch import Batch
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder
from tandem.data.source import BatchReader


class MappedData:
    """A map-style dataset in a shuffled order that is a function of (seed, step), so it has no state."""

    def __init__(self, dataset: Any, reader: BatchReader, order: GlobalOrder) -> None:
        self._dataset = dataset
        self._reader = reader
        self.order = order

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        reader = self._reader
        cut = self._reader.cut(self.order, start, stop)
        batches = train_batches(
            self._dataset,
            cut,
            seed=reader.seed,
            workers=reader.workers,
            collate=reader.collate,
            device=reader.device,
        )
        # One iterator serves all steps, so loader processes prepare batches of later steps, too.
        return (list(islice(batches, cut.micro_steps(step))) for step in range(start, stop))

    def state(self) -> Mapping[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass
