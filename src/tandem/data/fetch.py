"""How a map-style dataset is asked for a batch: in one piece where that gives the same, else by the sample.

What comes out depends on (seed, epoch, indices) alone, in whatever process. A sample is made under generators
seeded for (seed, epoch, index), so it is the same in every batch that it may be in; what draws for a whole
batch (a collate function, a batch-wise `__getitems__`) is seeded by the batch's first sample.
"""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from tandem.data.asked import Asking
from tandem.data.sampler import BatchKey
from tandem.data.seeds import NUMPY, PYTHON, TORCH, derive_seed, kept_generators, seed_host_generators
from tandem.errors import text_of

Batch = Any
"""What a dataset or a collate function makes: tensors in tuples, lists, dicts, mappings and dataclasses."""
Collate = Callable[[list[Any]], Batch]
Fetch = Callable[[Tensor, int, int], Batch]
"""(int64 indices [B], epoch, seed) -> a finished batch."""
BATCH = 1  # the last part of a seed that is for a whole batch


def is_stream(dataset: Any) -> bool:
    """Whether its samples can only be had one after the other."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def whole_fetch(dataset: Any, collate: Collate | None = None, augment: bool = False) -> Fetch | None:
    """How `dataset` is asked for a batch in one piece; None where it has to be asked sample by sample.

    It can be asked when it gives finished batches (`augmented` where `augment`, else `__getitems__`), or when
    it only picks rows of tensors and default_collate would stack them, or is made of such by torch's Subset
    and StackDataset. A class that has its own `__getitem__` is asked for samples, whatever it derives from.
    """
    kind = type(dataset)
    getitem = getattr(kind, "__getitem__", None)
    if getitem is Subset.__getitem__ and kind.__getitems__ is Subset.__getitems__:
        inner, chosen = whole_fetch(dataset.dataset, collate, augment), torch.as_tensor(dataset.indices)
        return inner and (lambda indices, epoch, seed: inner(chosen[indices], epoch, seed))
    if augment and hasattr(dataset, "augmented"):
        augmented: Fetch = dataset.augmented
        return augmented
    if collate is None and getitem is TensorDataset.__getitem__:
        return lambda indices, epoch, seed: [
            tensor.index_select(0, indices.to(tensor.device)) for tensor in dataset.tensors
        ]
    if collate is None and getitem is StackDataset.__getitem__:
        return _stacked(dataset, augment)
    return _seeded(dataset) if answers_in_batches(dataset) else None


def answers_in_batches(dataset: Any) -> bool:
    """Whether `__getitems__` gives finished batches; that of some datasets gives a list of samples."""
    if isinstance(dataset, Subset):
        return answers_in_batches(dataset.dataset)
    if isinstance(dataset, StackDataset) or not hasattr(dataset, "__getitems__") or len(dataset) == 0:
        return False
    with kept_generators():
        seed_host_generators(0)
        return not isinstance(dataset.__getitems__([0]), list)


class Samples(Dataset[Batch]):
    """Batches of `dataset` by their key, made of samples; no global generator is moved.

    Seeding three generators takes longer than many a sample, so only those are seeded for each sample from
    which this dataset has been seen to draw. Which it is shows after a batch: a generator that was not to be
    drawn from would give another number next. The batch is then made again, so nothing depends on when that
    was found. torch's is always among them, because its seed can be read without drawing (initial_seed).

    `__getitems__` that lists samples is used for as long as it draws nothing at all: its numbers would depend
    on which samples are asked for together, so on the number of ranks.
    """

    def __init__(self, dataset: Any, seed: int, collate: Collate | None) -> None:
        self.dataset, self.seed, self.collate = dataset, seed, collate or default_collate
        self._seeded = set() if hasattr(dataset, "__getitems__") else {TORCH}

    def __getitem__(self, key: BatchKey) -> Batch:
        try:
            return self._batch(key)
        except Exception as error:
            if get_worker_info() is None or _can_be_sent(type(error)):
                raise
            raise RuntimeError(f"{type(error).__name__}: {text_of(error)}") from error

    def _batch(self, key: BatchKey) -> Batch:
        epoch, indices, step = key
        of_epoch = derive_seed(self.seed, epoch)
        of_batch = derive_seed(indices[0], BATCH, start=of_epoch)
        with kept_generators():
            samples = None
            while samples is None:
                samples = self._samples(indices, of_epoch, of_batch)
            if self.collate is not default_collate:
                seed_host_generators(of_batch)
            return collated(self.collate, samples, step, epoch)

    def _samples(self, indices: list[int], of_epoch: int, of_batch: int) -> list[Any] | None:
        """The samples; None if a generator was drawn from that was not seeded for each."""
        unseeded = [generator for generator in (TORCH, PYTHON, NUMPY) if generator not in self._seeded]
        untouched = [generator.first(of_batch) for generator in unseeded]
        if self._seeded:
            samples = []
            for index in indices:
                seed = derive_seed(index, start=of_epoch)
                for generator in self._seeded:
                    generator.seed(seed)
                samples.append(self.dataset[index])
        else:
            samples = self.dataset.__getitems__(indices)
        drawn = [g for g, number in zip(unseeded, untouched, strict=True) if g.draw() != number]
        if not drawn:
            return samples
        self._seeded |= {TORCH, *drawn}
        return None


def _can_be_sent(kind: type[Exception]) -> bool:
    """Whether a loader process can send such an error; where it cannot, its rank would wait without end."""
    try:
        pickle.dumps(kind)
    except Exception:
        return False
    return True


def collated(collate: Collate | None, samples: list[Any], step: int | None, epoch: int) -> Batch:
    """A batch of the training step `step`; None: of none."""
    if step is not None and isinstance(collate, Asking):
        return collate.at(step, epoch, samples)
    return (collate or default_collate)(samples)


def _stacked(dataset: StackDataset[Any], augment: bool) -> Fetch | None:
    """StackDataset's parts asked each in one piece, put together as default_collate does it."""
    parts = dataset.datasets
    names = list(parts) if isinstance(parts, dict) else range(len(parts))
    fetches = [whole_fetch(parts[name], None, augment) for name in names]
    if None in fetches:
        return None

    def fetch(indices: Tensor, epoch: int, seed: int) -> Batch:
        batches = [part(indices, epoch, seed) for part in fetches if part is not None]
        return dict(zip(names, batches, strict=True)) if isinstance(parts, dict) else batches

    return fetch


def _seeded(dataset: Any) -> Fetch:
    """A batch-wise `__getitems__`, under generators seeded for the batch: it may draw."""

    def fetch(indices: Tensor, epoch: int, seed: int) -> Batch:
        with kept_generators():
            seed_host_generators(derive_seed(seed, epoch, int(indices[0]), BATCH))
            return dataset.__getitems__(indices)

    return fetch
