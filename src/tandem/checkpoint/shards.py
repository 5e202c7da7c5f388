"""A state of which each rank has a part: how a sharded tensor looks in it. See docs/checkpoints.md.

In the state of a rank, a sharded tensor is {SHARD: [shape of the whole, first row], VALUES: its rows}. These
are plain containers, so snapshots and checkpoints can keep it like any other state.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

SHARD = "tandem_shard"
VALUES = "values"

Path = tuple[Any, ...]
"""The keys that lead to a value in a state."""


def shard(shape: Sequence[int], first: int, values: Tensor) -> dict[str, Any]:
    """Return what represents a tensor of `shape` in the state of a rank that has its rows from `first` on."""
    return {SHARD: [list(shape), first], VALUES: values}


def is_shard(value: object) -> bool:
    """Return True for the result of `shard`."""
    return isinstance(value, dict) and value.keys() == {SHARD, VALUES}


def mapped_shards(state: Any, change: Callable[[Path, dict[str, Any]], Any], path: Path = ()) -> Any:
    """Copy dicts, lists and tuples; replace every shard by `change(path, shard)`."""
    if is_shard(state):
        return change(path, state)
    if isinstance(state, dict):
        return {key: mapped_shards(value, change, (*path, key)) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(mapped_shards(value, change, (*path, at)) for at, value in enumerate(state))
    return state
