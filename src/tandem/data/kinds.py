"""Select the data implementation for a dataset, in training and evaluation. No other module decides this."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tandem.data.block_order import VALID_SIZES, BlockOrder, checked_sizes
from tandem.data.fetch import Batch, Collate, is_stream, whole_fetch
from tandem.data.implementations import MappedData, ShardedData, StreamedData, stream_batches
from tandem.data.loader import share_batches
from tandem.data.mixture import Mixture
from tandem.data.sampler import GlobalOrder, MakeOrder
from tandem.data.source import BatchReader, TrainingData
from tandem.errors import ConfigError


def training_data(
    dataset: Any, reader: BatchReader, planned: int | None, order_of: MakeOrder = GlobalOrder
) -> TrainingData:
    """Return `dataset` as batches by step; `planned` is the number of steps of the run, if it is set.

    `order_of` creates the order of a map-style dataset; the default is a plain shuffle. Raises ConfigError if
    the dataset is smaller than one global batch, or is a stream without length and `planned` is None.
    """
    if isinstance(dataset, Mixture):
        order_of = dataset.order
    if hasattr(dataset, "block_sizes"):
        order_of = _block_order(dataset, order_of)
    if hasattr(dataset, "of_rank"):
        return ShardedData(dataset, reader)
    batch_size = reader.config.batch_size
    stream = is_stream(dataset)
    if not stream or hasattr(dataset, "__len__"):
        n = len(dataset)
    elif planned is not None:
        # Without a length, the whole run is one epoch.
        n = planned * batch_size
    else:
        raise ConfigError("the training set is a stream without __len__; set --steps")
    if stream:
        return StreamedData(dataset, reader, GlobalOrder(n, batch_size, reader.seed))
    return MappedData(dataset, reader, order_of(n, batch_size, reader.seed))


def _block_order(dataset: Any, order_of: MakeOrder) -> MakeOrder:
    """Return the order by the dataset's own blocks, unless the task defines blocks. Raises ConfigError."""
    name = type(dataset).__name__
    if hasattr(dataset, "of_rank") or is_stream(dataset) or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"{name} has block_sizes(), which is for datasets with __len__ and __getitems__ and without "
            "of_rank(); remove one of them"
        )
    if order_of is not GlobalOrder:
        return order_of
    try:
        return partial(BlockOrder, sizes=checked_sizes(dataset.block_sizes(), len(dataset)))
    except ValueError as error:
        raise ConfigError(f"block_sizes() of {name} returns {error}; {VALID_SIZES}") from None


def takes_workers(dataset: Any, collate: Collate | None) -> bool:
    """Return True if loader processes prepare the batches: not for streams or whole-batch datasets."""
    if hasattr(dataset, "of_rank") or is_stream(dataset):
        return False
    return whole_fetch(dataset, collate, augment=True) is None


def can_be_read_again(dataset: Any, rank: int, world_size: int) -> bool:
    """Return True if reading a few samples consumes nothing; False for an iterator."""
    if hasattr(dataset, "of_rank"):
        dataset = dataset.of_rank(rank, world_size)
    elif not is_stream(dataset):
        return True
    # An iterator returns itself and cannot start again.
    return iter(dataset) is not dataset


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
    """Yield this rank's strided share of the whole set: no padding, every sample on exactly one rank.

    The last batch may be smaller, and a rank beyond the set's size gets none. The epoch is always 0, so every
    evaluation sees the same samples.
    """
    if hasattr(dataset, "of_rank"):
        part = dataset.of_rank(rank, world_size)
        return stream_batches(part, slice(None), batch_size, seed, collate, device)
    if is_stream(dataset):
        share = slice(rank, None, world_size)
        return stream_batches(dataset, share, batch_size, seed, collate, device)
    return share_batches(
        dataset, rank, world_size, batch_size, seed=seed, workers=workers, collate=collate, device=device
    )
