"""A training state taken apart: its tensors in a fixed order, and everything else as a skeleton.

Saves and snapshots copy tensors into memory of their own and have to put the same state together again.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from torch import Tensor

HERE_WAS_A_TENSOR = ...
"""Stands for a tensor in a skeleton; marshal and torch.save both know it."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """(skeleton, tensors): containers copied; the tensors detached, in order of appearance."""
    tensors: list[Tensor] = []

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensors.append(value.detach())
        return HERE_WAS_A_TENSOR

    return {key: _mapped(value, take) for key, value in state.items()}, tensors


def unflatten(skeleton: Mapping[Any, Any], tensors: Iterable[Tensor]) -> dict[Any, Any]:
    """Inverse of `flatten`, with `tensors` in the places of the original ones."""
    following = iter(tensors)

    def put(value: Any) -> Any:
        return next(following) if value is HERE_WAS_A_TENSOR else value

    return {key: _mapped(value, put) for key, value in skeleton.items()}


def homes_by_place(skeleton: Mapping[Any, Any], homes: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """{place among a skeleton's tensors: the one that `homes` has of its name} of those in its "model"."""
    places = unflatten(skeleton, count())  # type: ignore[arg-type]  # numbers in the places of tensors
    model = places.get("model", {})
    here = [name for name in model if skeleton["model"][name] is HERE_WAS_A_TENSOR and name in homes]
    return {model[name]: homes[name] for name in here}


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Containers copied as dicts, lists and tuples, everything else as `leaf` gives it."""
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return leaf(value)
