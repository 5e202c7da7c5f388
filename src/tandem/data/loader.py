"""Batches on the device, in the sampler's order, with randomness that depends on (seed, epoch, index) alone.

A dataset that can be asked for a batch in one piece is asked in this process; every other goes through
torch's DataLoader and its workers. No state of a loader is ever saved: it starts anew from a step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tandem.data.fetch import Batch, Collate, Samples, whole_fetch
from tandem.data.sampler import BatchKey, TrainBatches
from tandem.errors import ConfigError
from tandem.signals import ignore_stop_signals


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
    fetch = whole_fetch(dataset, collate, augment=True)
    if fetch is None:
        yield from _loaded(Samples(dataset, seed, collate), sampler, workers, device)
        return
    for epoch, indices in sampler.micro_batches():
        yield moved(fetch(indices, epoch, seed), device)


def share_batches(
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
    """As `kinds.evaluation_batches`, of a map-style dataset."""
    share = range(rank, len(dataset), world_size)
    batches = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
    fetch = whole_fetch(dataset, collate)
    if fetch is None:
        keys = [(0, list(indices)) for indices in batches]
        yield from _loaded(Samples(dataset, seed, collate), keys, workers, device)
        return
    for indices in batches:
        yield moved(fetch(torch.tensor(indices), 0, seed), device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Every tensor of nested tuples, lists and dicts on `device`; asynchronous from pinned memory."""
    return _mapped(batch, lambda tensor: tensor.to(device, non_blocking=True))


def batch_size_of(batch: Batch) -> int:
    """Samples in a batch: the length of its first tensor that has one. Raises ConfigError where none has."""
    tensor = tensor_of(batch)
    if tensor is None:
        raise ConfigError("a batch has no tensor; the first one's length is the number of its samples")
    return len(tensor)


def tensor_of(batch: Batch) -> Tensor | None:
    """The first tensor with a dimension inside nested tuples, lists and dicts; text and numbers are none."""
    if isinstance(batch, Tensor):
        return batch if batch.dim() else None
    if isinstance(batch, dict | tuple | list):
        for part in batch.values() if isinstance(batch, dict) else batch:
            if (found := tensor_of(part)) is not None:
                return found
    return None


def parts_of(batch: Batch, sizes: Sequence[int]) -> list[Batch]:
    """A batch cut along the first dimension of every tensor in it that has one; the rest is in every part.

    `sizes` add up to the batch. A tensor of another length belongs to no sample, and is in every part too.
    """
    samples, begin, parts = sum(sizes), 0, []

    def cut(tensor: Tensor) -> Tensor:
        return tensor[begin : begin + size] if tensor.dim() and len(tensor) == samples else tensor

    for size in sizes:
        parts.append(_mapped(batch, cut))
        begin += size
    return parts


def _loaded(
    samples: Samples, keys: Iterable[BatchKey], workers: int, device: torch.device
) -> Iterator[Batch]:
    """A whole batch is one item to torch's DataLoader, so that `samples` decides how it is made."""
    loader: DataLoader[Batch] = DataLoader(
        samples,
        sampler=keys,
        batch_size=None,
        num_workers=workers,
        collate_fn=_as_it_is,
        pin_memory=device.type == "cuda",
        worker_init_fn=_start_worker if workers else None,
        # A rank comes from a fork server, and would start workers by it: they could not import a task's file.
        multiprocessing_context="fork" if workers else None,
        generator=torch.Generator().manual_seed(samples.seed),  # else the loader draws from the global one
    )
    for batch in loader:
        yield to_device(batch, device)


def _as_it_is(batch: Batch) -> Batch:
    return batch


def _start_worker(_worker: int) -> None:
    """A stop signal reaches the whole process tree, and the rank needs batches until all ranks agree."""
    ignore_stop_signals()


def moved(batch: Batch, device: torch.device) -> Batch:
    """`to_device`, by way of pinned memory."""
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
