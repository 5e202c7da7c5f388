"""Keep small datasets on the GPU: batches are gathered there, and only indices cross the bus."""

from collections.abc import Callable
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from tandem.data.datasets import TensorImages, TensorRows

MOST_BYTES = 256 * 2**20
"""Limit per dataset: little for any GPU, and enough for MNIST and CIFAR as stored in their files."""
# The tensors on the GPU are freed with the dataset.
_made: "WeakKeyDictionary[Any, dict[torch.device, Any]]" = WeakKeyDictionary()


def resident(dataset: Any, device: torch.device) -> Any:
    """Return `dataset` with its tensors on `device`, moved once; unchanged on a CPU or if unsuitable.

    Suitable datasets select rows of tensors and compute at most a normalization (TensorDataset, TensorRows,
    TensorImages without augmentation), up to MOST_BYTES; so is a Subset of one. The batches are the same.
    """
    if device.type == "cpu" or not _is_small(dataset):
        return dataset
    made = _made.setdefault(dataset, {})
    if device not in made:
        made[device] = _changed(dataset, lambda tensor: tensor.to(device))
    return made[device]


def picked(dataset: Any, indices: Tensor) -> Any:
    """Return a batch of a dataset that `resident` has moved, for indices [B] on its device."""
    if isinstance(dataset, TensorDataset):
        return [tensor.index_select(0, indices) for tensor in dataset.tensors]
    return dataset.__getitems__(indices)


def _is_small(dataset: Any) -> bool:
    if type(dataset) is Subset:
        return type(dataset.dataset) is not Subset and _is_small(dataset.dataset)
    tensors = _tensors_of(dataset)
    on_the_host = all(tensor.device.type == "cpu" for tensor in tensors)
    return bool(tensors) and on_the_host and sum(tensor.nbytes for tensor in tensors) <= MOST_BYTES


def _tensors_of(dataset: Any) -> tuple[Tensor, ...]:
    # A subclass may compute something else from its tensors, so isinstance() is too weak here.
    if type(dataset) is TensorDataset:
        return dataset.tensors
    if type(dataset) is TensorRows:
        return dataset.inputs, dataset.targets
    if type(dataset) is TensorImages and dataset.augment is None:
        return dataset.images, dataset.labels
    return ()


def _changed(dataset: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy the dataset with changed tensors; a Subset becomes a dataset of only its rows."""
    if type(dataset) is Subset:
        rows = torch.as_tensor(dataset.indices)
        chosen = _changed(dataset.dataset, lambda tensor: tensor.index_select(0, rows))
        return _changed(chosen, change)
    made = copy(dataset)
    if isinstance(made, TensorDataset):
        made.tensors = tuple(map(change, made.tensors))
    elif isinstance(made, TensorRows):
        made.inputs, made.targets = change(made.inputs), change(made.targets)
    else:
        made.images, made.labels = change(made.images), change(made.labels)
    return made
