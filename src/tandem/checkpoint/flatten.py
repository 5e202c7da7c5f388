"""A training state taken apart: its tensors in a fixed order, and everything else as a skeleton.

Saves and snapshots copy tensors into memory of their own and have to put the same state together again.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

HERE_WAS_A_TENSOR = ...
"""Stands for a tensor in a skeleton; marshal and torch.save both know it."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """(skeleton, tensors): containers copied; the tensors detached, in order of appearance."""
    tensors: list[Tensor] = []
    return {key: _take(value, tensors) for key, value in state.items()}, tensors


def _take(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value.detach())
        return HERE_WAS_A_TENSOR
    if isinstance(value, dict):
        return {key: _take(item, tensors) for key, item in value.items()}
    if type(value) is list:
        return [_take(item, tensors) for item in value]
    if type(value) is tuple:
        return tuple(_take(item, tensors) for item in value)
    return value


def unflatten(skeleton: Mapping[Any, Any], tensors: Iterable[Tensor]) -> dict[Any, Any]:
    """Inverse of `flatten`, with `tensors` in the places of the original ones."""
    following = iter(tensors)
    return {key: _put(value, following) for key, value in skeleton.items()}


def _put(value: Any, following: Iterator[Tensor]) -> Any:
    if value is HERE_WAS_A_TENSOR:
        return next(following)
    if isinstance(value, dict):
        return {key: _put(item, following) for key, item in value.items()}
    if type(value) is list:
        return [_put(item, following) for item in value]
    if type(value) is tuple:
        return tuple(_put(item, following) for item in value)
    return value
