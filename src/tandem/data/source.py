"""What a run trains on, and where it stands: the seam between the loop and all kinds of data.

The position is the global step alone. An implementation gives out the micro-batches of any range of steps,
the same for any number of ranks, and adds to a checkpoint only what the step does not say.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from tandem.config.slices import DataConfig
from tandem.data.fetch import BATCH, Batch, Collate, is_stream
from tandem.data.loader import moved, train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.data.seeds import derive_seed, kept_generators, seed_host_generators
from tandem.errors import ConfigError


@dataclass(frozen=True)
class Reader:
    """Who reads, and how: one rank of `world_size`, in batches as `config` has them, onto `device`."""

    config: DataConfig
    seed: int
    rank: int
    world_size: int
    collate: Collate | None
    device: torch.device

    def cut(self, order: GlobalOrder, start: int, stop: int) -> TrainBatches:
        """Its share of the steps of `order`."""
        return TrainBatches(order, self.rank, self.world_size, self.config.micro_batch_size, start, stop)


class TrainingData(Protocol):
    """Batches by global step."""

    order: GlobalOrder
    """Samples and steps of an epoch."""

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        """The reader's micro-batches, on its device, of each step from `start` to before `stop`."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What is to be saved besides the step to go on after the last step given out; often nothing."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """What `state` gave after the step before the one that `steps` is asked for next."""
        ...


def training_data(dataset: Any, reader: Reader, planned: int | None) -> TrainingData:
    """`dataset` as batches by step; `planned` steps are those of the run where they are set.

    Raises ConfigError if it has less than one global batch, or no end and no steps are set.
    """
    return StreamedData(dataset, reader, planned) if is_stream(dataset) else MappedData(dataset, reader)


class MappedData:
    """A map-style dataset in a shuffled order that follows from (seed, step): nothing to save."""

    def __init__(self, dataset: Any, reader: Reader) -> None:
        self._dataset, self._reader = dataset, reader
        self.order = GlobalOrder(len(dataset), reader.config.batch_size, reader.seed)

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        reader, cut = self._reader, self._reader.cut(self.order, start, stop)
        batches = train_batches(
            self._dataset,
            cut,
            seed=reader.seed,
            workers=reader.config.workers,
            collate=reader.collate,
            device=reader.device,
        )
        return (list(islice(batches, cut.micro_steps(step))) for step in range(start, stop))

    def state(self) -> Mapping[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


class StreamedData:
    """An iterable dataset in its own order: each step takes the next global batch.

    Every rank reads the whole stream and keeps its share of each batch, so the number of ranks may change.
    Where the dataset or its iterator has state_dict() and load_state_dict(), as torchdata has them, a resumed
    run goes on from there; other streams are read anew up to the place where the run stands. `set_epoch` is
    called where there is one. Each sample is read under generators seeded for (seed, epoch, place).
    """

    def __init__(self, dataset: Any, reader: Reader, planned: int | None) -> None:
        self._dataset, self._reader = dataset, reader
        batch_size, workers = reader.config.batch_size, reader.config.workers
        if workers:
            raise ConfigError(f"--workers is {workers}: ranks read a stream themselves, give 0")
        if hasattr(dataset, "__len__"):
            n = len(dataset)
        elif planned is not None:
            n = planned * batch_size
        else:
            raise ConfigError("the training set is a stream without a __len__: give --steps")
        self.order = GlobalOrder(n, batch_size, reader.seed)
        self._iterator: Any = iter(())
        self._saved: Mapping[str, Any] = {}

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        cut, size = self._reader.cut(self.order, start, stop), self.order.batch_size
        for step in range(start, stop):
            epoch, position = divmod(step, self.order.steps_per_epoch)
            places = range(position * size, (position + 1) * size)
            with kept_generators():
                if step == start or position == 0:
                    self._open(epoch, places.start)
                samples = [self._next(epoch, place) for place in places]
                batches = self._share(epoch, places, samples, cut.micro_sizes(step))
            yield [moved(batch, self._reader.device) for batch in batches]

    def state(self) -> Mapping[str, Any]:
        parts = {"dataset": self._dataset, "iterator": self._iterator}
        return {name: part.state_dict() for name, part in parts.items() if hasattr(part, "load_state_dict")}

    def load(self, state: Mapping[str, Any]) -> None:
        self._saved = state

    def _open(self, epoch: int, place: int) -> None:
        """Begin `epoch` at its sample `place`."""
        saved, self._saved = self._saved if place else {}, {}
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if "dataset" in saved:
            self._dataset.load_state_dict(saved["dataset"])
        seed_host_generators(derive_seed(self._reader.seed, epoch))
        self._iterator = iter(self._dataset)
        if "iterator" in saved:
            self._iterator.load_state_dict(saved["iterator"])
        for before in range(0 if saved else place):
            self._next(epoch, before)

    def _next(self, epoch: int, place: int) -> Any:
        seed_host_generators(derive_seed(self._reader.seed, epoch, place))
        try:
            return next(self._iterator)
        except StopIteration:
            epochs = f"epoch {epoch} of the training stream"
            raise EOFError(f"{epochs} ended after {place} samples, before its last step") from None

    def _share(self, epoch: int, places: range, samples: list[Any], sizes: list[int]) -> list[Batch]:
        """This rank's micro-batches of a global batch, each collated under generators seeded for it."""
        reader, batches, begin = self._reader, [], 0
        ours = slice(reader.rank, None, reader.world_size)
        for size in sizes:
            part = slice(begin, begin + size)
            first = places[ours][part][0]
            seed_host_generators(derive_seed(reader.seed, epoch, first, BATCH))
            batches.append((reader.collate or default_collate)(samples[ours][part]))
            begin += size
        return batches
