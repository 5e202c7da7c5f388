"""Serialize the state to bytes and back, and fingerprint weights."""

import hashlib
import io
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any, TypeGuard, TypeVar

import torch
from torch import Tensor

from tandem.checkpoint.manifest import state_entry
from tandem.checkpoint.plain import (
    DEEPEST,
    TYPES,
    VALID,
    Plain,
    UnsupportedValueError,
    format_path,
    restored,
    unusual,
)
from tandem.checkpoint.store import CheckpointStore, translated
from tandem.errors import CheckpointError, ConfigError, CorruptCheckpointError, UnloadableError, text_of

# Split a training state into its tensors, in a fixed order, and a skeleton of everything else.
#
# Saves and snapshots copy the tensors into their own memory and then rebuild the same state from the copies.

TENSOR_PLACEHOLDER = ...
"""Placeholder for a tensor in a skeleton. marshal can store it, and no plain state contains it."""
OF_A_LOOP = ("objects", "tensors", "numbers", "per_rank")
"""Parts whose keys are names that a script chose, which identify a value better than the part's name."""


def flatten(state: Mapping[str, Any]) -> tuple[dict[Any, Any], list[Tensor]]:
    """Return (skeleton, tensors): plain containers, and detached tensors in order of appearance.

    `unflatten` returns the plain state, and `plain.restored` converts that back to the original types. Raises
    ConfigError, with the path of the value, for values that cannot be saved.
    """
    tensors: list[Tensor] = []

    def take(value: Tensor) -> Any:
        tensors.append(value)
        return TENSOR_PLACEHOLDER

    skeleton = dict[Any, Any]()
    converted = list[Any]()
    for name, value in state.items():
        plain = Plain(take)
        try:
            skeleton[name] = plain.of(value)
        except UnsupportedValueError as error:
            path = [name, *error.path]
            where = format_path(path[1:] if name in OF_A_LOOP and len(path) > 1 else path)
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
        return next(following) if value is TENSOR_PLACEHOLDER else value

    return {key: _mapped(value, put) for key, value in skeleton.items()}


def destinations_by_index(
    skeleton: Mapping[Any, Any], destinations: Mapping[str, Tensor]
) -> dict[int, Tensor]:
    """Return {index of a model tensor in the skeleton: the tensor of `destinations` with its name}."""
    indices = unflatten(skeleton, count())  # type: ignore[arg-type]  # indices in place of tensors
    model = indices.get("model", {})
    here = [name for name in model if skeleton["model"][name] is TENSOR_PLACEHOLDER and name in destinations]
    return {model[name]: destinations[name] for name in here}


def _mapped(value: Any, leaf: Callable[[Any], Any]) -> Any:
    """Copy dicts, lists and tuples; replace every other value by `leaf(value)`."""
    if isinstance(value, dict):
        return {key: _mapped(item, leaf) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, leaf) for item in value)
    return leaf(value)


SLACK_BYTES = 2**20
"""Bytes that a state may need beyond its file's size, for small tensors that were saved expanded."""
View = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
"""The identity of a tensor: storage, offset, shape, strides, dtype."""
MOST_NAMES = 16
"""The tensors of all names may need this many times the file's size, because layers may share a tensor."""


def weights_sha256(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the parameters and buffers in an unwrapped module's state_dict, keys sorted.

    Per key: UTF-8 name, NUL, str(dtype) such as "torch.float32", str(tuple(shape)) such as "(3, 4)", then the
    elements in row-major order, little-endian.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):  # a module's get_extra_state can put any other object there
            digest.update(f"{name}\0{value.dtype}{tuple(value.shape)}".encode())
            digest.update(_little_endian(value))
    return digest.hexdigest()


def _little_endian(value: Tensor) -> memoryview:
    flat = value.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8)
    if sys.byteorder == "big":
        width = flat.element_size() // (2 if flat.is_complex() else 1)
        raw = raw.reshape(-1, width).flip(1).contiguous().reshape(-1)
    return raw.numpy().data


def serialize(state: Mapping[str, Any]) -> bytes:
    """Return the state as torch.save writes it. Raises ConfigError for what could not be loaded again."""
    skeleton, tensors = flatten(state)
    buffer = io.BytesIO()
    torch.save(unflatten(skeleton, _apart(tensors)), buffer)
    return buffer.getvalue()


def _apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Copy expanded tensors, which would be rejected on load, into full-size memory; keep ties."""
    ours = dict[View, Tensor]()
    taken = set[int]()
    for tensor in tensors:
        view = _view(tensor)
        if view not in ours:
            is_alone = view[0] not in taken and tensor.nbytes <= tensor.untyped_storage().nbytes()
            ours[view] = tensor if is_alone else tensor.clone(memory_format=torch.contiguous_format)
            taken.add(view[0])
        yield ours[view]


def _view(tensor: Tensor) -> View:
    storage = tensor.untyped_storage()._cdata
    return storage, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype


def deserialize(raw: bytes) -> dict[str, Any]:
    """Inverse of `serialize`, tensors on the CPU; never runs pickled code. Raises UnloadableError."""
    _check_records(io.BytesIO(raw), len(raw))
    return _restored(_loaded(io.BytesIO(raw), len(raw)))


def deserialize_file(path: Path, destinations: Mapping[str, Tensor]) -> dict[str, Any]:
    """Load a file that `serialize` wrote, without holding the file's contents in memory next to the state.

    Tensors are copied one by one: a model's into the tensor of `destinations` with the same name, dtype and
    shape, all others into new memory. Nothing in the result refers to the file. Raises UnloadableError and
    OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_records(file, size)
    skeleton, tensors = flatten(_loaded(path, size))
    there = destinations_by_index(skeleton, destinations)
    for index, tensor in enumerate(tensors):
        destination = there.get(index)
        if has_form(destination, tensor.dtype, tensor.shape):
            tensors[index] = destination.copy_(tensor)
        else:
            tensors[index] = tensor.clone()
    return _restored(unflatten(skeleton, tensors))


def has_form(destination: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> TypeGuard[Tensor]:
    """Return True if `destination` can take values of this dtype and shape; a shard (DTensor) cannot."""
    return type(destination) is Tensor and destination.dtype == dtype and destination.shape == shape


def destination_or_memory(destination: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    """Return `destination` if values of this form can be copied straight into it, else new host memory."""
    if has_form(destination, dtype, shape) and destination.is_contiguous():
        return destination
    return torch.empty(shape, dtype=dtype)


def _loaded(source: io.BytesIO | Path, size: int) -> dict[str, Any]:
    from_file = isinstance(source, Path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about sparse tensors, which are rejected below
            state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=from_file)
    except OSError:
        raise
    except Exception as error:  # torch's readers raise many types of errors for arbitrary bytes
        raise UnloadableError(f"the checkpoint's state cannot be loaded: {_first_line(error)}") from error
    _check_needs(state, size)
    return state


def _restored(state: dict[str, Any]) -> dict[str, Any]:
    try:
        return restored(state) if isinstance(state, dict) else state
    except ValueError as error:
        raise UnloadableError(f"the checkpoint's state cannot be loaded: {error}") from error


def _check_needs(state: object, size: int) -> None:
    """Raise UnloadableError for a state whose copy would need more memory than its file of `size` bytes.

    A view can claim any shape from one byte (stride 0), and a sparse or meta tensor can have any shape at
    all. A pickled list can contain another list a thousand times. Names that share a tensor, such as tied
    weights, are each counted, up to MOST_NAMES times the file.
    """
    distinct = dict[View, int]()
    by_name = 0
    values = 0
    level: list[tuple[Any, tuple[Any, ...]]] = [(state, ())]
    while level:
        value, path = level.pop()
        values += 1
        if isinstance(value, Tensor):
            if type(value) not in (Tensor, torch.nn.Parameter) or unusual(value):
                raise _too_much(path, unusual(value) or f"a {type(value).__name__}")
            distinct[_view(value)] = value.nbytes
            by_name += value.nbytes
            if value.nbytes > size + SLACK_BYTES:
                raise _too_much(path, f"a tensor of {value.nbytes:,} bytes in a file of {size:,} bytes")
        elif isinstance(value, dict | list | tuple | set):
            # Each value takes a byte of the file at least. More values mean that a list is contained in
            # others many times.
            if len(path) > DEEPEST or values > size:
                raise _too_much(path, "nested too deeply")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            level += [(item, (*path, key)) for key, item in items]
    if sum(distinct.values()) > size + SLACK_BYTES or by_name > size * MOST_NAMES + SLACK_BYTES:
        raise UnloadableError(
            f"the checkpoint's state has tensors of {by_name:,} bytes in a file of {size:,} bytes; not loaded"
        )


def _too_much(path: tuple[Any, ...], what: str) -> UnloadableError:
    return UnloadableError(
        f"the checkpoint's state cannot be loaded: {format_path(path or ('it',))} is {what}"
    )


def _check_records(file: IO[bytes], size: int) -> None:
    """Reject archives that expand beyond the file's size: torch.save neither compresses nor shares bytes."""
    if file.read(2) != b"PK":
        return  # from an older torch, or not a checkpoint at all: torch reports it
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, LookupError, struct.error, NotImplementedError, OSError) as error:
        raise UnloadableError(
            f"the checkpoint's state is not a complete archive: {_first_line(error)}"
        ) from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise UnloadableError("the checkpoint's state is compressed, which torch.save never does; not loaded")
    if sum(record.file_size for record in records) > size:
        raise UnloadableError("the checkpoint's state has records larger than the file; not loaded")


def _first_line(error: BaseException) -> str:
    """Return the reason of an error in one line.

    The weights_only error of torch has its reason in the middle of the advice to run the code anyway.
    """
    blocked = re.search(r"unsupported GLOBAL (\S+) whose module", text_of(error))
    if blocked:
        return f"it would run {blocked[1]}; nothing in it was run"
    text = text_of(error).rpartition("WeightsUnpickler error:")[2].partition(" Please use `torch")[0].strip()
    return (text or type(error).__name__).splitlines()[0].strip()


# Large states, which do not fit in memory twice: use the file in place, and hash it before and after.

T = TypeVar("T")
LARGE_BYTES = 256 * 2**20


def large_file_of(store: CheckpointStore, step: int) -> Path | None:
    """Return the file of a large state in a directory; None for all others. Raises CorruptCheckpointError."""
    # On an object store, reading the manifest costs a request.
    if not isinstance(folder := store.path(step), Path):
        return None
    name, wanted = state_entry(store.manifest(step))
    return folder / name if wanted["bytes"] >= LARGE_BYTES else None


def read_in_place(
    store: CheckpointStore, step: int, path: Path, use: Callable[[Path], T]
) -> tuple[T, dict[str, Any]]:
    """Return (`use(path)`, info of the step). Raises CorruptCheckpointError before a damaged file is used.

    Raises CheckpointError if the file changed while it was used, because the result may then be wrong.
    """
    # The file is read three times; with the page cache, only the first read is from the disk.
    store.verify(step, from_disk=False)
    with translated(f"cannot read {path}"):
        made = use(path)
    try:
        store.verify(step, from_disk=False)
    except CorruptCheckpointError as error:
        raise CheckpointError(f"the file changed while it was being loaded; start again: {error}") from error
    return made, store.info(step)
