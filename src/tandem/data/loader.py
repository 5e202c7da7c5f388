"""Batches on the device, in the sampler's order, with randomness that depends on (seed, epoch, index) alone.

A dataset that answers for many indices at once is asked directly, in this process. Every other goes through
torch's DataLoader and its workers, each sample under generators seeded for it. What draws for a whole batch
(a collate function, `__getitems__`) is seeded by its first sample. No state of a loader is ever saved: it
starts anew from a step.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from tandem.data.sampler import SampleKey, TrainBatches
from tandem.data.seeds import derive_seed, seed_generators
from tandem.signals import ignore_stop_signals

Batch = Any
"""What a dataset or a collate function makes: tensors in tuples, lists and dicts."""
Collate = Callable[[list[Any]], Batch]
BATCH = 1  # the last part of a seed that is for a whole batch


def train_batches(
    dataset: Any,
    sampler: TrainBatches,
    *,
    seed: int,
    workers: int = 0,
    collate: Collate | None = None,
    device: torch.device,
) -> Iterator[Batch]:
    """This rank's micro-batches, from the sampler's first step to its last, moved to `device`."""
    if answers_in_batches(dataset):
        fetch = _fetcher(dataset)
        for epoch, indices in sampler.micro_batches():
            seed_generators(_batch_seed(seed, epoch, int(indices[0])))
            yield _moved(fetch(indices, epoch, seed), device)
    else:
        yield from _loaded(dataset, sampler, seed, workers, collate, device)


def evaluation_batches(
    dataset: Any,
    rank: int,
    world_size: int,
    batch_size: int,
    *,
    seed: int = 0,
    workers: int = 0,
    collate: Collate | None = None,
    device: torch.device,
) -> Iterator[Batch]:
    """This rank's strided share of the whole set: no padding, every sample on exactly one rank.

    The last batch may be smaller; a rank beyond the set's size gets none.
    """
    batches = _Chunks(range(rank, len(dataset), world_size), batch_size)
    if answers_in_batches(dataset):
        for keys in batches:
            yield _moved(dataset.__getitems__([index for _, index in keys]), device)
    else:
        yield from _loaded(dataset, batches, seed, workers, collate, device)


class Seeded(Dataset[Any]):
    """`dataset` with keys (epoch, index), giving (key, sample): made under generators seeded for it.

    Covers torch's CPU generator, `random` and NumPy's global one; all are put back afterwards.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed = dataset, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: SampleKey) -> tuple[SampleKey, Any]:
        epoch, index = key
        with seeded(derive_seed(self.seed, epoch, index)):
            return key, self.dataset[index]


class SeededCollate:
    """`collate` for what `Seeded` gives, under generators seeded for the batch.

    A collate function that masks or mixes at random would otherwise draw on where its worker has got to,
    which a resumed run cannot know.
    """

    def __init__(self, collate: Collate, seed: int) -> None:
        self.collate, self.seed = collate, seed

    def __call__(self, keyed: list[tuple[SampleKey, Any]]) -> Batch:
        epoch, first = keyed[0][0]
        with seeded(_batch_seed(self.seed, epoch, first)):
            return self.collate([sample for _, sample in keyed])


def _batch_seed(seed: int, epoch: int, first_index: int) -> int:
    return derive_seed(seed, epoch, first_index, BATCH)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Global CPU generators seeded with `seed` inside, as they were outside; CUDA's are not touched."""
    generator = torch.default_generator
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    torch_state, python_state = generator.get_state(), random.getstate()
    numpy_state = numpy_random.get_state() if numpy_random is not None else None
    generator.manual_seed(seed)
    random.seed(seed)
    if numpy_random is not None:
        numpy_random.seed(seed & 0xFFFFFFFF)
    try:
        yield
    finally:
        generator.set_state(torch_state)
        random.setstate(python_state)
        if numpy_random is not None:
            numpy_random.set_state(numpy_state)


def answers_in_batches(dataset: Any) -> bool:
    """Whether `__getitems__` gives finished batches; that of some datasets gives a list of samples."""
    if isinstance(dataset, Subset):
        return answers_in_batches(dataset.dataset)
    if not hasattr(dataset, "__getitems__") or len(dataset) == 0:
        return False
    with seeded(0):
        return not isinstance(dataset.__getitems__([0]), list)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Every tensor of nested tuples, lists and dicts on `device`; asynchronous from pinned memory."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def batch_size_of(batch: Batch) -> int:
    """Samples in a batch: the length of its first tensor."""
    if isinstance(batch, Tensor):
        return len(batch)
    parts = batch.values() if isinstance(batch, dict) else batch
    return batch_size_of(next(iter(parts)))


class _Chunks(Sampler[list[SampleKey]]):
    """Indices in chunks, each with epoch 0: an evaluation sees the same samples every time."""

    def __init__(self, indices: Sequence[int], batch_size: int) -> None:
        self.indices, self.batch_size = indices, batch_size

    def __iter__(self) -> Iterator[list[SampleKey]]:
        for start in range(0, len(self.indices), self.batch_size):
            yield [(0, index) for index in self.indices[start : start + self.batch_size]]

    def __len__(self) -> int:
        return -(-len(self.indices) // self.batch_size)


def _fetcher(dataset: Any) -> Callable[[Tensor, int, int], Batch]:
    """`augmented` where the dataset has it, also behind torch's Subset; `__getitems__` where not."""
    if isinstance(dataset, Subset):
        inner, chosen = _fetcher(dataset.dataset), torch.as_tensor(dataset.indices)
        return lambda indices, epoch, seed: inner(chosen[indices], epoch, seed)
    if hasattr(dataset, "augmented"):
        augmented: Callable[[Tensor, int, int], Batch] = dataset.augmented
        return augmented
    return lambda indices, epoch, seed: dataset.__getitems__(indices)


def _loaded(
    dataset: Any,
    batches: Sampler[list[SampleKey]],
    seed: int,
    workers: int,
    collate: Collate | None,
    device: torch.device,
) -> Iterator[Batch]:
    loader: DataLoader[Any] = DataLoader(
        Seeded(dataset, seed),
        batch_sampler=batches,
        num_workers=workers,
        collate_fn=SeededCollate(collate or default_collate, seed),
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker if workers else None,
        # A rank comes from a fork server, and would start workers by it: they could not import a task's file.
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(seed),  # else the loader draws from the global one
    )
    for batch in loader:
        yield to_device(batch, device)


def _start_worker(_worker: int) -> None:
    """A stop signal reaches the whole process tree, and the rank needs batches until all ranks agree."""
    ignore_stop_signals()


def _moved(batch: Batch, device: torch.device) -> Batch:
    return to_device(_mapped(batch, Tensor.pin_memory) if device.type == "cuda" else batch, device)


def _mapped(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _mapped(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_mapped(value, function) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(_mapped(value, function) for value in batch)
    return batch
