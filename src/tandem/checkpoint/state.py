"""What is saved, as bytes, and the fingerprint of weights."""

import hashlib
import io
import re
import struct
import sys
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch
from torch import Tensor

from tandem.checkpoint.flatten import flatten, homes_by_place, unflatten
from tandem.checkpoint.plain import DEEPEST, restored, shown, unusual
from tandem.errors import UnloadableError, text_of

SLACK_BYTES = 2**20
"""More than its file that a state may need: small tensors that were saved expanded."""
View = tuple[int, int, torch.Size, tuple[int, ...], torch.dtype]
"""What makes two tensors the same: storage, offset, shape, strides, type."""
MOST_NAMES = 16
"""Times a file's size that the tensors of all names in it may need: layers may share one."""


def weights_sha256(state: Mapping[str, Any]) -> str:
    """SHA-256 of the parameters and buffers in an unwrapped module's state_dict, keys sorted.

    Per key: UTF-8 name, NUL, str(dtype) such as "torch.float32", str(tuple(shape)) such as "(3, 4)", then
    the elements in row-major order, little-endian.
    """
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        if isinstance(value, Tensor):  # a module's get_extra_state may put anything else there
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
    """The state as torch.save writes it. Raises ConfigError for what could not be loaded again."""
    skeleton, tensors = flatten(state)
    buffer = io.BytesIO()
    torch.save(unflatten(skeleton, _apart(tensors)), buffer)
    return buffer.getvalue()


def _apart(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The tensors, each with memory for all its elements, or it would not be loaded; ties stay ties."""
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
    """Inverse of `serialize`, tensors on the CPU; no pickled code runs. Raises UnloadableError."""
    _check_records(io.BytesIO(raw), len(raw))
    return _restored(_loaded(io.BytesIO(raw), len(raw)))


def deserialize_file(path: Path, homes: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same of a file that `serialize` has written, which is never in memory besides the state itself.

    Tensors are copied one by one: a model's into the one that `homes` has of its name and form, the rest into
    memory of their own. Nothing of the state is the file's afterwards. Raises UnloadableError and OSError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        _check_records(file, size)
    skeleton, tensors = flatten(_loaded(path, size))
    there = homes_by_place(skeleton, homes)
    for place, tensor in enumerate(tensors):
        home = there.get(place)
        if has_form(home, tensor.dtype, tensor.shape):
            tensors[place] = home.copy_(tensor)
        else:
            tensors[place] = tensor.clone()
    return _restored(unflatten(skeleton, tensors))


def has_form(home: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> TypeGuard[Tensor]:
    """Whether a tensor can take the values of one of that form; a share of a tensor cannot."""
    return type(home) is Tensor and home.dtype == dtype and home.shape == shape


def _loaded(source: io.BytesIO | Path, size: int) -> dict[str, Any]:
    from_file = isinstance(source, Path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of sparse tensors, which are refused below
            state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=from_file)
    except OSError:
        raise
    except Exception as error:  # torch's readers assume some order in bytes that may be anything
        raise UnloadableError(f"the checkpoint's state cannot be loaded: {_first_line(error)}") from error
    _check_needs(state, size)
    return state


def _restored(state: dict[str, Any]) -> dict[str, Any]:
    try:
        return restored(state) if isinstance(state, dict) else state
    except ValueError as error:
        raise UnloadableError(f"the checkpoint's state cannot be loaded: {error}") from error


def _check_needs(state: object, size: int) -> None:
    """Raise UnloadableError for a state that, when it is copied, needs more memory than its file, of `size`.

    A view may claim any shape of one byte (stride 0), a sparse tensor or one without values any shape at all,
    and a pickled list may hold another one a thousand times. Names that share one tensor, such as tied
    weights, are each counted up to MOST_NAMES times the file.
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
            if len(path) > DEEPEST or values > size:
                raise _too_much(path, "nested too deeply")
            items = value.items() if isinstance(value, dict) else enumerate(value)
            level += [(item, (*path, key)) for key, item in items]
    if sum(distinct.values()) > size + SLACK_BYTES or by_name > size * MOST_NAMES + SLACK_BYTES:
        raise UnloadableError(
            f"the checkpoint's state has tensors of {by_name:,} bytes in a file of {size:,} bytes; not loaded"
        )


def _too_much(path: tuple[Any, ...], what: str) -> UnloadableError:
    return UnloadableError(f"the checkpoint's state cannot be loaded: {shown(path or ('it',))} is {what}")


def _check_records(file: IO[bytes], size: int) -> None:
    """What is loaded is not larger than what was read: torch.save neither compresses nor shares bytes."""
    if file.read(2) != b"PK":
        return  # of an older torch, or nothing at all: torch says so
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
    """torch's weights_only error has its reason in the middle of its advice, which is to run the code."""
    blocked = re.search(r"unsupported GLOBAL (\S+) whose module", text_of(error))
    if blocked:
        return f"it would run {blocked[1]}; nothing in it was run"
    text = text_of(error).rpartition("WeightsUnpickler error:")[2].partition(" Please use `torch")[0].strip()
    return (text or type(error).__name__).splitlines()[0].strip()
