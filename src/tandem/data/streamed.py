"""Iterable data, in its own order: datasets that can only be read one sample after another."""

from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import default_collate

from tandem.data.fetch import BATCH, Batch, Collate, collated
from tandem.data.loader import moved
from tandem.data.sampler import GlobalOrder
from tandem.data.seeds import derive_seed, kept_generators, seed_host_generators
from tandem.data.source import BatchReader
from tandem.errors import ConfigError


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
            with kept_generators():
                if step == start or position == 0:
                    self._open(epoch, indices.start)
                samples = [self._next(epoch, index) for index in indices]
                batches = self._share(step, indices, samples, cut.places, cut.micro_sizes(step))
            # The block above has ended: the step that runs now must find the generators as they were.
            yield [moved(batch, self._reader.device) for batch in batches]

    def state(self) -> Mapping[str, Any]:
        parts = {"dataset": self._dataset, "iterator": self._iterator}
        return {name: part.state_dict() for name, part in parts.items() if hasattr(part, "load_state_dict")}

    def load(self, state: Mapping[str, Any]) -> None:
        self._saved = state

    def _open(self, epoch: int, index: int) -> None:
        """Start `epoch` at sample number `index`."""
        # A saved state belongs to the middle of its epoch. The next epoch begins without it.
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
            epochs = f"epoch {epoch} of the training stream"
            raise EOFError(f"{epochs} ended after {index} samples, before its last step") from None

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
        with kept_generators():
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
