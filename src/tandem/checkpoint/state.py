"""What is saved, as bytes, and the fingerprint of weights."""

import hashlib
import io
import pickle
import re
import struct
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeGuard

import torch
from torch import Tensor

from tandem.checkpoint.flatten import flatten, homes_by_place, unflatten
from tandem.errors import CheckpointError


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
    """The state as torch.save writes it. Raises CheckpointError for what could not be loaded again."""
    check_loadable(state)
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()


def deserialize(raw: bytes) -> dict[str, Any]:
    """Inverse of `serialize`, tensors on the CPU; no pickled code runs. Raises CheckpointError."""
    _check_records(io.BytesIO(raw), len(raw))
    return _loaded(io.BytesIO(raw))


def deserialize_file(path: Path, homes: Mapping[str, Tensor]) -> dict[str, Any]:
    """The same of a file that `serialize` has written, which is never in memory besides the state itself.

    Tensors are copied one by one: a model's into the one that `homes` has of its name and form, the rest into
    memory of their own. Nothing of the state is the file's afterwards. Raises CheckpointError and OSError.
    """
    with path.open("rb") as file:
        _check_records(file, path.stat().st_size)
    skeleton, tensors = flatten(_loaded(path))
    there = homes_by_place(skeleton, homes)
    for place, tensor in enumerate(tensors):
        home = there.get(place)
        if has_form(home, tensor.dtype, tensor.shape):
            tensors[place] = home.copy_(tensor)
        else:
            tensors[place] = tensor.clone()
    return unflatten(skeleton, tensors)


def has_form(home: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> TypeGuard[Tensor]:
    """Whether a tensor can take the values of one of that form; a share of a tensor cannot."""
    return type(home) is Tensor and home.dtype == dtype and home.shape == shape


def _loaded(source: io.BytesIO | Path) -> dict[str, Any]:
    from_file = isinstance(source, Path)
    try:
        state: dict[str, Any] = torch.load(source, map_location="cpu", weights_only=True, mmap=from_file)
    except (pickle.UnpicklingError, struct.error, RuntimeError, EOFError, LookupError, ValueError) as error:
        raise CheckpointError(f"the checkpoint's state cannot be loaded: {_first_line(error)}") from error
    return state


def _check_records(file: IO[bytes], size: int) -> None:
    """What is loaded is not larger than what was read: torch.save neither compresses nor shares bytes."""
    if file.read(2) != b"PK":
        return  # of an older torch, or nothing at all: torch says so
    try:
        with zipfile.ZipFile(file) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, ValueError, LookupError, struct.error, NotImplementedError, OSError) as error:
        raise CheckpointError(f"the checkpoint's state is no whole archive: {_first_line(error)}") from error
    if any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise CheckpointError(
            "the checkpoint's state is compressed, as no state of torch.save is; not loaded"
        )
    if sum(record.file_size for record in records) > size:
        raise CheckpointError("the checkpoint's state has records larger than the file; not loaded")


def check_loadable(state: Mapping[str, Any]) -> None:
    """Raise CheckpointError for what `deserialize` would refuse; costs about 1 ms."""
    for key, value in state.items():
        _check_loadable(key, value)


def _check_loadable(key: str, value: object) -> None:
    """Save and load `value` with its tensors left out: found out now rather than at a resume."""
    buffer = io.BytesIO()
    try:
        torch.save(_without_tensors(value), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"the state's {key!r} cannot be saved ({_first_line(error)}); "
            "keep to tensors, numbers, text, lists and dicts"
        ) from error


def _without_tensors(value: object) -> object:
    if isinstance(value, Tensor):
        return None
    if type(value) in (dict, OrderedDict):
        return {key: _without_tensors(item) for key, item in value.items()}  # type: ignore[attr-defined]
    if type(value) in (list, tuple):
        return [_without_tensors(item) for item in value]  # type: ignore[attr-defined]
    return value


def _first_line(error: BaseException) -> str:
    """torch's weights_only error has its reason in the middle of its advice, which is to run the code."""
    blocked = re.search(r"unsupported GLOBAL (\S+) whose module", str(error))
    if blocked:
        return f"it would run {blocked[1]}, and nothing in it was run"
    text = str(error).rpartition("WeightsUnpickler error:")[2].partition(" Please use `torch")[0].strip()
    return (text or type(error).__name__).splitlines()[0].strip()
