"""Read the tensors and numbers of files that a program leaves, without running code from them.

Formats: torch.save (.pt, .pth, .bin, .ckpt, .tar), safetensors, NumPy, and directories of
torch.distributed.checkpoint (DCP). `torch.load(weights_only=True)` reads most files of torch.save. It rejects
a file with objects of other classes, such as a namespace of arguments. A restricted unpickler then reads the
file: it builds tensors and containers, and replaces every other object by its contents.
"""

import io
import json
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tandem.text import one_line

TORCH = frozenset((".pt", ".pth", ".bin", ".ckpt", ".tar"))
NUMPY = frozenset((".npy", ".npz"))
SAFETENSORS = ".safetensors"
METADATA = ".metadata"
"""The file of a DCP directory that lists its tensors."""
DEEPEST = 64
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool, "UntypedStorage": torch.uint8,
}  # fmt: skip
Leaf = Tensor | float
"""A value to compare: a tensor or a number."""


class UnreadableError(Exception):
    """A file is damaged, or has a format that cannot be read without running its code."""


def has_tensors(path: PurePath) -> bool:
    """Return whether a file of this name may contain tensors."""
    return path.suffix in TORCH | NUMPY or path.suffix == SAFETENSORS or path.name == METADATA


def read(path: Path) -> dict[str, Leaf]:
    """Return {dotted name: tensor or number} of a file; text is left out. Raises UnreadableError."""
    try:
        if path.name == METADATA:
            return _dcp(path.parent)
        if path.suffix == SAFETENSORS:
            return dict(_safetensors(path))
        if path.suffix == ".npy":
            return {"": torch.from_numpy(np.array(np.load(path, allow_pickle=False)))}
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return {name: torch.from_numpy(np.array(arrays[name])) for name in arrays}
        return dict(leaves(_torch(path)))
    except UnreadableError:
        raise
    # A reader may raise any error for a damaged file.
    except Exception as error:
        raise UnreadableError(f"{path.name}: {one_line(error)}") from error


def leaves(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Leaf]]:
    """Yield the tensors and numbers in nested containers with their dotted names."""
    if isinstance(value, Tensor):
        yield name, value.detach()
    elif isinstance(value, PickledObject):
        yield from leaves(value.contents(), name, depth)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in "biufc":
            yield name, torch.from_numpy(np.array(value))
    elif isinstance(value, bool | int | float | np.generic) and not isinstance(value, np.str_ | np.bytes_):
        # An integer may have more digits than a float.
        yield name, value if isinstance(value, float) else value.item() if hasattr(value, "item") else value
    elif isinstance(value, bytes | bytearray):
        yield name, torch.tensor(list(value), dtype=torch.uint8)
    elif depth < DEEPEST and isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaves(inner, f"{name}.{key}" if name else str(key), depth + 1)
    elif depth < DEEPEST and isinstance(value, list | tuple | set | frozenset):
        items: Iterable[Any] = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        for number, inner in enumerate(items):
            yield from leaves(inner, f"{name}.{number}" if name else str(number), depth + 1)


def _torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, AttributeError, TypeError, KeyError):
        if not zipfile.is_zipfile(path):
            raise
    with zipfile.ZipFile(path) as archive:
        pickled = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
        return _Restricted(io.BytesIO(archive.read(pickled)), archive, pickled[: -len("data.pkl")]).load()


class PickledObject:
    """A placeholder for an object of any other class, which stores its arguments and state in the pickle."""

    arguments: tuple[Any, ...]
    state: Any
    items: dict[Any, Any]
    members: list[Any]

    # Do not set them in __init__, which pickle does not call for most objects.
    def __new__(cls, *arguments: Any, **options: Any) -> "PickledObject":
        found = super().__new__(cls)
        found.arguments = arguments
        found.state = options or None
        found.items = {}
        found.members = []
        return found

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        self.items[key] = value

    def append(self, value: Any) -> None:
        self.members.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self.members.extend(values)

    def __hash__(self) -> int:
        return hash(repr(self.arguments))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PickledObject) and vars(self) == vars(other)

    def contents(self) -> Any:
        """Return the object's content in the pickle, as containers."""
        state = self.state
        # A class with __slots__ has a state of two dicts.
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):
            state = {**(state[0] or {}), **state[1]}
        if isinstance(state, dict) and not self.arguments and not self.items and not self.members:
            return state
        parts = {"arguments": self.arguments, "state": state, "items": self.items, "members": self.members}
        return {name: part for name, part in parts.items() if part}

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of an object whose pickle has its `__dict__`."""
        state = self.contents()
        return state if isinstance(state, dict) else {}


class _Dict(dict[Any, Any]):
    """A dict with attributes, because a module's state has its `_metadata` as one."""


class _Restricted(pickle.Unpickler):
    """Builds tensors and containers only. No name in the file is imported."""

    def __init__(self, file: io.BytesIO, archive: zipfile.ZipFile | None = None, prefix: str = "") -> None:
        super().__init__(file)
        self._archive = archive
        self._prefix = prefix

    def find_class(self, module: str, name: str) -> Any:
        known: dict[tuple[str, str], Any] = {
            ("collections", "OrderedDict"): _Dict,
            ("collections", "defaultdict"): lambda *_: _Dict(),
            ("_codecs", "encode"): lambda text, _: text.encode("latin1"),
            ("builtins", "set"): set,
            ("builtins", "frozenset"): frozenset,
            ("builtins", "bytearray"): bytearray,
            ("builtins", "complex"): complex,
            ("torch", "Size"): lambda sizes=(): tuple(sizes),
            ("torch._utils", "_rebuild_tensor"): _strided,
            ("torch._utils", "_rebuild_tensor_v2"): _strided,
            ("torch._utils", "_rebuild_parameter"): lambda data, *_: data,
            ("torch._utils", "_rebuild_parameter_with_state"): lambda data, *_: data,
            ("torch.storage", "UntypedStorage"): torch.uint8,
        }
        if (module, name) in known:
            return known[module, name]
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        # This must be a new class, because pickle calls `cls.__new__` and compares types.
        return type(name, (PickledObject,), {"__module__": module})

    def persistent_load(self, pid: Any) -> Tensor:
        """Return the storage of a tensor: pid is ("storage", type, key, location, number of elements)."""
        if self._archive is None:
            raise UnreadableError("a tensor outside its file")
        _, dtype, key, *_ = pid
        if not isinstance(dtype, torch.dtype):
            raise UnreadableError("a storage of an unknown type")
        raw = bytearray(self._archive.read(f"{self._prefix}data/{key}"))
        return torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)


def _strided(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return storage.as_strided(tuple(size), tuple(stride), offset)


def _safetensors(path: Path) -> Iterator[tuple[str, Leaf]]:
    # The length of the header (8 bytes), the header as JSON, and the tensors' bytes.
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise UnreadableError(f"{path.name}: cut off")
        header = json.loads(file.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            file.seek(8 + length + first)
            raw = bytearray(file.read(last - first))
            if len(raw) < last - first:
                raise UnreadableError(f"{path.name}: cut off")
            dtype = DTYPES.get(entry["dtype"], torch.uint8)
            tensor = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
            yield name, tensor.reshape(entry["shape"]) if entry["dtype"] in DTYPES else tensor


def _dcp(folder: Path) -> dict[str, Leaf]:
    """Read a DCP directory, whose metadata has the file and offset of each part of a tensor."""
    metadata = _Restricted(io.BytesIO((folder / METADATA).read_bytes())).load().attributes()
    storage = {}
    for index, info in metadata["storage_data"].items():
        key = index.attributes()
        offset = key.get("offset")
        storage[key["fqn"], tuple(offset) if offset is not None else None] = info.attributes()
    found: dict[str, Leaf] = {}
    for name, entry in metadata["state_dict_metadata"].items():
        parts = entry.attributes()
        if "chunks" not in parts:
            found.update(leaves(_part(folder, storage[name, None]), name))
            continue
        size = tuple(parts["size"])
        whole: Tensor | None = None
        for chunk in parts["chunks"]:
            offsets = tuple(chunk.attributes()["offsets"])
            part = _part(folder, storage[name, offsets])
            if whole is None:
                whole = torch.zeros(size, dtype=part.dtype)
            place = tuple(slice(at, at + n) for at, n in zip(offsets, part.shape, strict=True))
            whole[place] = part
        if whole is not None:
            found[name] = whole
    return found


def _part(folder: Path, info: Mapping[str, Any]) -> Any:
    name = PurePath(info["relative_path"])
    if name.is_absolute() or ".." in name.parts:
        raise UnreadableError(f"{name} is outside its directory")
    with (folder / name).open("rb") as file:
        file.seek(info["offset"])
        raw = file.read(info["length"])
    return torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
