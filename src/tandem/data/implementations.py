"""The kinds of data: map-style in tandem's order, in parts per rank, and iterable in its own order."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import default_collate

from tandem.data.block_order import ReadAhead
from tandem.data.fetch import BATCH, Batch, Collate, collated
from tandem.data.host_generators import KeptGenerators
from tandem.data.loader import moved, train_batches
from tandem.data.sampler import GlobalOrder
from tandem.data.seeds import derive_seed, seed_host_generators
from tandem.data.source import BatchReader
from tandem.errors import ConfigError

# Map-style data (`__len__` and `__getitem__`), in tandem's own order.


class MappedData:
    """A map-style dataset in a shuffled order that is a function of (seed, step), so it has no state."""

    def __init__(self, dataset: Any, reader: BatchReader, order: GlobalOrder) -> None:
        """Raise ConfigError if the dataset cannot hold the blocks that this rank reads at a time."""
        self._dataset = dataset
        self._reader = reader
        self.order = order
        if hasattr(dataset, "hold") and hasattr(order, "open_blocks"):
            own = reader.cut(order, 0, 0).positions
            dataset.hold(order.open_blocks(own), max(1, reader.workers))

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        reader = self._reader
        cut = self._reader.cut(self.order, start, stop)
        if hasattr(self._dataset, "will_need") and hasattr(self.order, "blocks"):
            cut.before_step = ReadAhead(self._dataset, self.order, cut.positions, start, stop)
        batches = train_batches(
            self._dataset,
            cut,
            seed=reader.seed,
            workers=reader.workers,
            collate=reader.collate,
            device=reader.device,
        )
        # One iterator serves all steps, so loader processes can prepare batches of later steps.
        return (list(islice(batches, cut.micro_steps(step))) for step in range(start, stop))

    def state(self) -> Mapping[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        pass


# Data in parts, one per rank and of any length: files per rank, or a dataset that shards itself.
#
# Such a dataset has a method `of_rank(rank, world_size)`, which returns a new iterable of that rank's samples
# on each call. A rank whose part has ended contributes no samples to the remaining steps. All ranks know all
# lengths from the start, so a step needs no communication, and the epoch ends on all ranks with the longest
# part.


class ShardedOrder(GlobalOrder):
    """Steps of an epoch if each rank has its own `sizes` samples and uses an equal share in each step."""

    def __init__(self, sizes: Sequence[int], batch_size: int, seed: int) -> None:
        # GlobalOrder refuses fewer samples than a batch. Here the longest part decides the number of steps.
        super().__init__(max(sum(sizes), batch_size), batch_size, seed)
        if not any(sizes):
            raise ConfigError("of_rank() of the training set returns no samples for any rank")
        if batch_size % len(sizes):
            raise ConfigError(f"--batch-size {batch_size} does not divide evenly over {len(sizes)} ranks")
        self.n = sum(sizes)
        self.sizes = list(sizes)
        self.share = batch_size // len(sizes)
        self.steps_per_epoch = max(-(-size // self.share) for size in sizes)

    def of_rank(self, step: int, rank: int) -> int:
        """Return the number of samples that a rank contributes to a step."""
        before = step % self.steps_per_epoch * self.share
        return min(max(self.sizes[rank] - before, 0), self.share)

    def samples(self, step: int) -> int:
        return sum(self.of_rank(step, rank) for rank in range(len(self.sizes)))

    def samples_before(self, step: int) -> int:
        epochs, position = divmod(step, self.steps_per_epoch)
        return epochs * self.n + sum(min(size, position * self.share) for size in self.sizes)


class ShardedData:
    """This rank's own samples, in their order; a micro-batch without samples is None."""

    def __init__(self, dataset: Any, reader: BatchReader) -> None:
        """All ranks must call this, because it gathers their sizes. Raises ConfigError."""
        if reader.gather is None:
            raise ConfigError(
                "a dataset with of_rank() works only in tasks; in a custom loop remove of_rank()"
            )
        if reader.config.workers not in (0, "auto"):
            raise ConfigError(
                f"--workers: invalid value {reader.config.workers}; expected 0, because "
                "ranks read of_rank() themselves"
            )
        if reader.config.batch_shares is not None:
            raise ConfigError(
                "--batch-shares does not work with a dataset that has of_rank(), which decides the parts"
            )
        self._dataset = dataset
        self._reader = reader
        own_part = self._part()
        # A part without a length is read once to count it.
        size = len(own_part) if hasattr(own_part, "__len__") else sum(1 for _ in own_part)
        self.sharded = ShardedOrder(reader.gather(size), reader.config.batch_size, reader.seed)
        self.order: GlobalOrder = self.sharded
        self._samples: Iterator[Any] = iter(())

    def steps(self, start: int, stop: int) -> Iterator[list[Batch | None]]:
        reader = self._reader
        order = self.sharded
        micro = reader.config.micro_batch_size or order.share
        parts = -(-order.share // micro)
        for step in range(start, stop):
            epoch, position = divmod(step, order.steps_per_epoch)
            with KeptGenerators():
                if step == start or position == 0:
                    self._open(epoch, position * order.share)
                count = order.of_rank(step, reader.rank)
                # Each rank makes the same number of micro-batches, so that collectives match. Some may be
                # empty.
                sizes = [count // parts + (part < count % parts) for part in range(parts)]
                batches = [self._batch(step, part, size) for part, size in enumerate(sizes)]
            yield [None if batch is None else moved(batch, reader.device) for batch in batches]

    def state(self) -> Mapping[str, Any]:
        return {"sizes": self.sharded.sizes}

    def load(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if the sizes of the parts changed: a step would mean other samples."""
        before = state.get("sizes")
        now = self.sharded.sizes
        if before is not None and before != now:
            raise ConfigError(
                f"cannot resume: of_rank() returned {_listed(before)} samples for the ranks and now returns "
                f"{_listed(now)}; use as many ranks and the same data, another --run-dir, or --resume never"
            )

    def _part(self) -> Any:
        return self._dataset.of_rank(self._reader.rank, self._reader.world_size)

    def _open(self, epoch: int, index: int) -> None:
        """Start `epoch` at this rank's sample number `index`."""
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        seed_host_generators(derive_seed(self._reader.seed, epoch, self._reader.rank))
        self._samples = iter(self._part())
        # The interface has no way to skip samples without reading them.
        for _ in islice(self._samples, index):
            pass

    def _batch(self, step: int, part: int, size: int) -> Batch | None:
        if size == 0:
            return None
        reader, (epoch, position) = self._reader, divmod(step, self.sharded.steps_per_epoch)
        seed_host_generators(derive_seed(reader.seed, epoch, position, part, reader.rank, BATCH))
        samples = list(islice(self._samples, size))
        if len(samples) < size:
            raise ConfigError(
                f"of_rank({reader.rank}, {reader.world_size}) of the training set ended before its length; "
                "let len() of its result, if defined, be what it yields, the same in each epoch"
            )
        return collated(reader.collate, samples, step, epoch)


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


# Iterable data, in its own order: datasets that can only be read one sample after another.


class StreamedData:
    """An iterable dataset in its own order: each step takes the next global batch.

    Every rank reads the whole stream and keeps its share of each batch, so the number of ranks may change. If
    the dataset or its iterator has state_dict() and load_state_dict(), as in torchdata, a resumed run
    continues from that state. Other streams are read again up to the position of the run. `set_epoch` is
    called if it exists. Each sample is read with generators seeded for (seed, epoch, position).
    """

    def __init__(self, dataset: Any, reader: BatchReader, order: GlobalOrder) -> None:
        if reader.config.workers not in (0, "auto"):
            raise ConfigError(
                f"--workers: invalid value {reader.config.workers}; expected 0, because "
                "ranks read a stream themselves"
            )
        self._dataset = dataset
        self._reader = reader
        self.order = order
        self._iterator: Any = iter(())
        self._saved: Mapping[str, Any] = {}

    def steps(self, start: int, stop: int) -> Iterator[list[Batch]]:
        cut = self._reader.cut(self.order, start, stop)
        size = self.order.batch_size
        for step in range(start, stop):
            epoch, position = divmod(step, self.order.steps_per_epoch)
            indices = range(position * size, (position + 1) * size)
            with KeptGenerators():
                if step == start or position == 0:
                    self._open(epoch, indices.start)
                samples = [self._next(epoch, index) for index in indices]
                batches = self._share(step, indices, samples, cut.positions, cut.micro_sizes(step))
            # The block above has ended, because the step that runs now must find the generators as they were.
            yield [moved(batch, self._reader.device) for batch in batches]

    def state(self) -> Mapping[str, Any]:
        parts = {"dataset": self._dataset, "iterator": self._iterator}
        return {name: part.state_dict() for name, part in parts.items() if hasattr(part, "load_state_dict")}

    def load(self, state: Mapping[str, Any]) -> None:
        self._saved = state

    def _open(self, epoch: int, index: int) -> None:
        """Start `epoch` at sample number `index`."""
        # A saved state belongs to the middle of its epoch, so the next epoch begins without it.
        saved = self._saved if index else {}
        self._saved = {}
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        if "dataset" in saved:
            self._dataset.load_state_dict(saved["dataset"])
        seed_host_generators(derive_seed(self._reader.seed, epoch))
        self._iterator = iter(self._dataset)
        if "iterator" in saved:
            self._iterator.load_state_dict(saved["iterator"])
        for before in range(0 if saved else index):
            self._next(epoch, before)

    def _next(self, epoch: int, index: int) -> Any:
        seed_host_generators(derive_seed(self._reader.seed, epoch, index))
        try:
            return next(self._iterator)
        except StopIteration:
            raise ConfigError(self._why_too_short(epoch, index)) from None

    def _why_too_short(self, epoch: int, samples: int) -> str:
        """Describe a stream that ended before the last step of its epoch."""
        ended = f"the training stream ended after {samples:,} samples in epoch {epoch}"
        size = self.order.batch_size
        full = samples // size
        if hasattr(self._dataset, "__len__"):
            return f"{ended}, but its __len__ says {len(self._dataset):,}; let __len__ return what it yields"
        fits = f"set the steps to {full}" if full else f"use batches of at most {samples} samples"
        return (
            f"{ended}, before the end of step {full + 1:,} of {self.order.steps_per_epoch:,}, with batches "
            f"of {size:,}; {fits}, or define __len__, after which a new epoch begins"
        )

    def _share(
        self, step: int, indices: range, samples: list[Any], ours: slice, sizes: list[int]
    ) -> list[Batch]:
        """Return this rank's micro-batches of a global batch, each collated with generators seeded for it."""
        reader = self._reader
        batches = []
        begin = 0
        epoch = step // self.order.steps_per_epoch
        for size in sizes:
            part = slice(begin, begin + size)
            first = indices[ours][part][0]
            seed_host_generators(derive_seed(reader.seed, epoch, first, BATCH))
            batches.append(collated(reader.collate, samples[ours][part], step, epoch))
            begin += size
        return batches


def stream_batches(
    dataset: Any, share: slice, batch_size: int, seed: int, collate: Collate | None, device: torch.device
) -> Iterator[Batch]:
    """Yield an iterable dataset to its end, in batches of the samples in `share`.

    Each sample is read with generators seeded for its position, as in training. A stream that shuffles
    therefore has the same order on all ranks, and each sample is in exactly one share.
    """
    samples = islice(_seeded(dataset, seed), share.start, share.stop, share.step)
    for number in count():
        with KeptGenerators():
            batch = list(islice(samples, batch_size))
            if not batch:
                return
            seed_host_generators(derive_seed(seed, number, BATCH))
            collated = (collate or default_collate)(batch)
        yield moved(collated, device)


def _seeded(dataset: Any, seed: int) -> Iterator[Any]:
    seed_host_generators(derive_seed(seed))
    samples = iter(dataset)
    end = object()
    for index in count():
        seed_host_generators(derive_seed(seed, index))
        if (sample := next(samples, end)) is end:
            return
        yield sample
