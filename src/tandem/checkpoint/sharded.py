"""Checkpoints to which each rank writes its own file. docs/checkpoints.md describes the format.

In the state of a rank, a sharded tensor is {SHARD: [shape of the whole, first row], VALUES: its rows}. These
are plain containers, so snapshots and checkpoints can keep it like any other state.

A rank's file has the bytes of its rows, one range after another, and then an index of the ranges in JSON. The
state's file has everything else; there, {SHARD: [shape, dtype]} represents a sharded tensor.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.bounded_reader import count, text
from tandem.checkpoint.manifest import check_size, is_sharded, shard_entries
from tandem.checkpoint.pinned import ALIGNMENT
from tandem.checkpoint.snapshot import NO_DESTINATIONS
from tandem.checkpoint.state import (
    MOST_NAMES,
    SLACK_BYTES,
    deserialize,
    deserialize_file,
    destination_or_memory,
    large_file_of,
    read_in_place,
)
from tandem.checkpoint.storage.protocol import Sink, StorageReader
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, CorruptCheckpointError, UnloadableError

SHARD = "tandem_shard"
VALUES = "values"

Path = tuple[Any, ...]
"""The keys that lead to a value in a state."""

Parts = dict[str, dict[str, Any]]
"""The shards of a rank by name, such as {"model/first.weight": shard(...)}."""
Rows = Callable[[int], tuple[int, int]]
"""(rows of a whole tensor) -> (first row, number of rows) to read."""
PIECE_BYTES = 8 * 2**20
LARGEST_INDEX_BYTES = 256 * 2**20


def shard(shape: Sequence[int], first: int, values: Tensor) -> dict[str, Any]:
    """Return the entry for a tensor of `shape` in the state of a rank that has its rows from `first` on."""
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


def all_rows(length: int) -> tuple[int, int]:
    """Read whole tensors."""
    return 0, length


def name_of(path: Path) -> str:
    """Return the name of the sharded tensor at `path`; unique, because only the last key can contain "/"."""
    return "/".join(map(str, path))


def divided(state: Mapping[str, Any]) -> tuple[dict[str, Any], Parts]:
    """Return (the state for the state's file, this rank's shards by name)."""
    parts = Parts()

    def take(path: Path, part: dict[str, Any]) -> dict[str, Any]:
        parts[name_of(path)] = part
        return {SHARD: [part[SHARD][0], _dtype_name(part[VALUES])]}

    return mapped_shards(dict(state), take), parts


def _dtype_name(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def write_parts(parts: Parts, sink: Sink) -> dict[str, Any]:
    """Write a rank's file; return the fields of its manifest entry other than size and hash."""
    index = list[dict[str, Any]]()
    written: dict[Any, dict[str, Any]] = {}
    for name, part in parts.items():
        values = part[VALUES]
        if not values.numel():
            continue
        # Tied weights have two names and one memory.
        key = values.data_ptr(), values.dtype, values.shape, values.stride()
        if key not in written:
            sink.write(bytes(-sink.bytes % ALIGNMENT))
            written[key] = _write_range(values, sink)
        shape, first = part[SHARD]
        offsets = [first, *[0] * (len(shape) - 1)]
        about = {"name": name, "dtype": _dtype_name(values), "shape": shape, "offsets": offsets}
        index.append({**about, "lengths": list(values.shape), **written[key]})
    raw = ("[\n" + ",\n".join(map(json.dumps, index)) + "\n]\n").encode()
    begin = sink.bytes
    sink.write(raw)
    return {"index": {"offset": begin, "sha256": hashlib.sha256(raw).hexdigest()}}


def _write_range(values: Tensor, sink: Sink) -> dict[str, Any]:
    digest = hashlib.sha256()
    begin = sink.bytes
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(raw), PIECE_BYTES):
        piece = raw[start : start + PIECE_BYTES]
        digest.update(piece)
        sink.write(piece)
    return {"file_offset": begin, "bytes": len(raw), "sha256": digest.hexdigest()}


def read_state(
    store: CheckpointStore, step: int, destinations: Mapping[str, Tensor] = NO_DESTINATIONS
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (whole state, info) of any checkpoint, its hashes verified.

    A tensor of the state's "model" is read into the tensor of `destinations` with the same name, dtype and
    shape. Raises CorruptCheckpointError, UnloadableError, and CheckpointError for a failing volume.
    """
    if is_sharded(store.manifest(step)):
        if not destinations:
            return read_rows(store, step, all_rows)
        # A run that finds damage may continue with the current content of `destinations`, so check everything
        # before writing anything.
        read_rows(store, step, all_rows, only_checks=True)
        try:
            return read_rows(store, step, all_rows, destinations)
        except (CorruptCheckpointError, UnloadableError) as error:
            raise CheckpointError(f"the files changed while being loaded; start again: {error}") from error
    # A large state is used in place, because its bytes do not fit in memory next to its tensors.
    if path := large_file_of(store, step):
        return read_in_place(store, step, path, lambda file: deserialize_file(file, destinations))
    payload, info = store.read(step)
    return deserialize(payload), info


def read_rows(
    store: CheckpointStore,
    step: int,
    rows: Rows,
    destinations: Mapping[str, Tensor] = NO_DESTINATIONS,
    only_checks: bool = False,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (state, info) of a sharded checkpoint, reading only the ranges with these `rows`.

    With `all_rows`, sharded tensors are tensors in the state, else a `shards.shard` each. With `only_checks`,
    they have no values. Raises as `read_state`.
    """
    manifest = store.manifest(step)
    state = deserialize(store.read(step)[0])
    files = shard_entries(manifest)
    size = sum(entry["bytes"] for entry in files.values())
    targets = _targets(state, rows, destinations, size, "meta" if only_checks else "cpu")
    for name, wanted in files.items():

        def fill(file: StorageReader, name: str = name, wanted: Mapping[str, Any] = wanted) -> None:
            where = store.path(step) / name
            check_size(where, dict(wanted), file.size)
            for entry in _index(file, wanted, where):
                if entry.name in targets:
                    targets[entry.name].take(file, entry, where)

        store.use(step, name, fill)
    made = {name: target.result(is_whole=rows is all_rows) for name, target in targets.items()}
    return _replaced(state, lambda path: made[name_of(path)]), manifest["info"]


class _Range(NamedTuple):
    """An entry of an index: rows of the tensor `name` from `first` on, and the place of their bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    first: int
    length: int
    offset: int
    bytes: int
    sha256: str


def _index(file: StorageReader, wanted: Mapping[str, Any], where: object) -> list[_Range]:
    """Return the ranges in a file, whose size has been checked. Raises CorruptCheckpointError."""
    about = wanted["index"]
    size = wanted["bytes"] - about["offset"]
    if not 0 <= size <= LARGEST_INDEX_BYTES:
        raise UnloadableError(f"{where} has an index of {size:,} bytes; not loaded")
    raw = _bytes_at(file, about["offset"], size, about["sha256"], where)
    try:
        return [_range(each, about["offset"]) for each in json.loads(raw)]
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError) as error:
        raise UnloadableError(f"the index of {where} is not one that this version can read") from error


def _range(entry: Mapping[str, Any], end: int) -> _Range:
    """Return an index's entry. Raises ValueError, TypeError or KeyError for anything else."""
    shape, offsets, lengths = (
        [count(each) for each in entry[key]] for key in ("shape", "offsets", "lengths")
    )
    # Only rows are divided, as fully_shard does.
    is_rows = len(shape) == len(offsets) == len(lengths) > 0 and not any(offsets[1:])
    if not is_rows or lengths[1:] != shape[1:] or offsets[0] + lengths[0] > shape[0]:
        raise ValueError("not a range of rows")
    size = count(entry["bytes"])
    offset = count(entry["file_offset"])
    dtype = text(entry["dtype"])
    if size != math.prod(lengths) * _dtype(dtype).itemsize or offset + size > end:
        raise ValueError("another size than its rows")
    return _Range(
        text(entry["name"]), dtype, tuple(shape), offsets[0], lengths[0], offset, size, text(entry["sha256"])
    )


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"no dtype: {name}")
    return found


def _bytes_at(file: StorageReader, offset: int, size: int, sha256: str, where: object) -> bytes:
    file.seek(offset)
    raw = file.read(size)
    _check(hashlib.sha256(raw).hexdigest() == sha256, offset, size, where)
    return raw


def _check(is_equal: bool, offset: int, size: int, where: object) -> None:
    if not is_equal:
        raise CorruptCheckpointError(
            f"{where} is damaged: the SHA-256 of bytes {offset} to {offset + size} differs"
        )


def _read_range(file: StorageReader, entry: "_Range", into: Tensor, begin: int, where: object) -> None:
    """Copy the bytes of `entry` from `begin` on into a tensor of bytes; hash all of them on the way.

    Works in pieces, so that a large range needs no memory in addition to its tensor. `into` is invalid if
    this raises.
    """
    digest = hashlib.sha256()
    file.seek(entry.offset)
    for start in range(0, entry.bytes, PIECE_BYTES):
        piece = file.read(min(PIECE_BYTES, entry.bytes - start))
        digest.update(piece)
        first = max(start, begin)
        last = min(start + len(piece), begin + len(into))
        if first < last and not into.is_meta:
            found = torch.frombuffer(bytearray(piece), dtype=torch.uint8)
            into[first - begin : last - begin].copy_(found[first - start : last - start])
    _check(digest.hexdigest() == entry.sha256, entry.offset, entry.bytes, where)


class _Target:
    """The rows of one tensor that this rank needs, and those that have been read so far."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: str, first: int, values: Tensor) -> None:
        self._form = name, dtype, shape
        self._first = first
        self._values = values
        self._taken: list[tuple[int, int]] = []

    def take(self, file: StorageReader, entry: _Range, where: object) -> None:
        """Copy the wanted rows of `entry`. Raises CorruptCheckpointError and UnloadableError."""
        if (entry.name, entry.dtype, entry.shape) != self._form:
            raise UnloadableError(f"{where} has another {entry.name} than the checkpoint's state")
        first = max(self._first, entry.first)
        last = min(self._first + len(self._values), entry.first + entry.length)
        if first >= last:
            return
        row = entry.bytes // entry.length
        with torch.no_grad():
            wanted = self._values[first - self._first : last - self._first].reshape(-1).view(torch.uint8)
            _read_range(file, entry, wanted, (first - entry.first) * row, where)
        self._taken.append((first, last))

    def result(self, is_whole: bool) -> Any:
        """Return the tensor, or the shard unless `is_whole`. Raises UnloadableError if rows are missing."""
        end = self._first
        for first, last in sorted(self._taken):
            if first != end:
                break
            end = last
        name, _, shape = self._form
        if self._values.numel() and (end != self._first + len(self._values)):
            raise UnloadableError(f"the checkpoint's files do not have each row of {name} once")
        return self._values if is_whole else shard(shape, self._first, self._values)


def _targets(
    state: Mapping[str, Any], rows: Rows, destinations: Mapping[str, Tensor], file_bytes: int, device: str
) -> dict[str, _Target]:
    """Return the tensors to fill, with memory on `device`. Raises UnloadableError for impossible sizes."""
    forms: dict[Path, tuple[tuple[int, ...], str]] = {}

    def note(path: Path, about: Any) -> None:
        shape, dtype = about
        forms[path] = tuple(count(each) for each in shape), text(dtype)

    try:
        _each_place(state, note)
        sizes = [math.prod(shape) * _dtype(dtype).itemsize for shape, dtype in forms.values() if shape]
    except (ValueError, TypeError) as error:
        raise UnloadableError(f"the checkpoint's state has a shard that is none: {error}") from error
    # Several names may share one range, but not arbitrarily many.
    if len(sizes) < len(forms) or sum(sizes) > MOST_NAMES * file_bytes + SLACK_BYTES:
        raise UnloadableError("the checkpoint's sharded tensors are larger than its files; not loaded")
    targets = {}
    for path, (shape, dtype) in forms.items():
        first, length = rows(shape[0])
        destination = destinations.get(str(path[-1])) if path[0] == "model" else None
        with torch.device(device):
            values = destination_or_memory(destination, _dtype(dtype), torch.Size((length, *shape[1:])))
        targets[name_of(path)] = _Target(name_of(path), shape, dtype, first, values)
    return targets


def _is_place(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {SHARD}


def _each_place(value: Any, note: Callable[[Path, Any], None], path: Path = ()) -> None:
    if _is_place(value):
        note(path, value[SHARD])
    elif isinstance(value, dict | list | tuple):
        items: Iterable[Any] = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            _each_place(item, note, (*path, key))


def _replaced(value: Any, made: Callable[[Path], Any], path: Path = ()) -> Any:
    if _is_place(value):
        return made(path)
    if isinstance(value, dict):
        for key, item in value.items():
            value[key] = _replaced(item, made, (*path, key))
    return value


def file_name(rank: int, ranks: int) -> str:
    """Return the name of a rank's file; an object store adds a unique part."""
    return f"shard-{rank:05d}-of-{ranks:05d}.bin"
