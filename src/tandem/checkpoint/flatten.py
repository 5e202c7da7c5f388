"""A training state taken apart: its tensors in a fixed order, and everything else as a skeleton.

Saves and snapshots copy tensors into memory of their own and have to put the same state together again.
"""

from collections.abc import Callable, Iterable, Mapping
from itertools import count
from typing import Any

from torch import Tensor

from tandem.checkpoint.plain import TYPES, VALID, Plain, RefusedError, shown
from tandem.errors import ConfigError

HERE_WAS_A_TENSOR = ...
"""Stands for a tensor in a skeleton; marshal knows it, and no plain state has one."""
OF_A_LOOP = ("objects", "tensors", "numbers", "per_rank")
"""Parts whose keys are names that a script has chosen: they say more than the part's."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """(skeleton, tensors): containers copied, in plain types; the tensors detached, in order of appearance.

    `unflatten` gives a plain state, and `plain.restored` what it was made of. Raises ConfigError, naming the
    place, for what cannot be saved.
    """
    tensors: list[Tensor] = []

    def take(value: Tensor) -> Any:
        tensors.append(value)
        return HERE_WAS_A_TENSOR

    skeleton, converted = dict[Any, Any](), list[Any]()
    for name, value in state.items():
        plain = Plain(take)
        try:
            skeleton[name] = plain.of(value)
        except RefusedError as error:
            path = [name, *error.path]
            where = shown(path[1:] if name in OF_A_LOOP and len(path) > 1 else path)
            advice = "" if ";" in error.what else f"; {VALID}"
            raise ConfigError(f"cannot save the state: {where} is {error.what}{advice}") from error
        converted += [((name, *reversed(keys)), was) for keys, was in plain.converted]
    if converted:
        skeleton[TYPES] = converted
    return skeleton, tensors


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
