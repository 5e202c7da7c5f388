"""Split a training state into its tensors, in a fixed order, and a skeleton of everything else.

Saves and snapshots copy the tensors into their own memory and then rebuild the same state from the copies.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from torch import Tensor

from tandem.checkpoint.plain import TYPES, VALID, Plain, UnsupportedValueError, shown
from tandem.errors import ConfigError

HERE_WAS_A_TENSOR = ...
"""Placeholder for a tensor in a skeleton. marshal can store it, and no plain state contains it."""
OF_A_LOOP = ("objects", "tensors", "numbers", "per_rank")
"""Parts whose keys are names chosen by a script, which identify a value better than the part's name."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """Return (skeleton, tensors): plain containers, and detached tensors in order of appearance.

    `unflatten` returns the plain state, and `plain.restored` converts that back to the original types. Raises
    ConfigError, with the path of the value, for what cannot be saved.
    """
    tensors: list[Tensor] = []

    def take(value: Tensor) -> Any:
        tensors.append(value)
        return HERE_WAS_A_TENSOR

    skeleton = dict[Any, Any]()
    converted = list[Any]()
    for name, value in state.items():
        plain = Plain(take)
        try:
            skeleton[name] = plain.of(value)
        except UnsupportedValueError as error:
            path = [name, *error.path]
            where = shown(path[1:] if name in OF_A_LOOP and len(path) > 1 else path)
            # Some descriptions have their own advice, after a semicolon.
            advice = "" if ";" in error.what else f"; {VALID}"
            raise ConfigError(f"cannot save the state: {where} is {error.what}{advice}") from error
        converted += [((name, *reversed(keys)), was) for keys, was in plain.converted]
    if converted:
        skeleton[TYPES] = converted
    return skeleton, tensors


def unflatten(skeleton: Mapping[Any, Any], tensors: Iterable[Tensor]) -> dict[Any, Any]:
    """Inverse of `flatten`, with `tensors` in place of the original ones."""
    following = iter(tensors)

    def put(value: Any) -> Any:
        return next(following) if value is HERE_WAS_A_TENSOR else value

    return {key: _mapped(value, put) for key, value in skeleton.items()}


def homes_by_index(skeleton: Mapping[Any, Any], homes: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Return {index of a model tensor in the skeleton: the tensor in `homes` with the same name}."""
    indices = unflatten(skeleton, count())  # type: ignore[arg-type]  # indices in place of tensors
    model = indices.get("model", {})
    here = [name for name in model if skeleton["model"][name] is HERE_WAS_A_TENSOR and name in homes]
    return {model[name]: homes[name] for name in here}


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy dicts, lists and tuples; replace every other value by `leaf(value)`."""
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return leaf(value)
