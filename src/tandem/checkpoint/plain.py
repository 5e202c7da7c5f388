"""Convert a state to plain types that all readers know: tensors, numbers, text, lists, tuples and dicts.

`torch.load(weights_only=True)` and marshal know different types, and both silently change or reject some. A
state is therefore converted once, before it is saved, kept in memory or sent: a NumPy number becomes a Python
number, an array a tensor, a set a list. The original types are recorded under TYPES, by path, and `restored`
converts the values back. Every other type is rejected, with its path.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TYPES = "tandem_types"
"""The part of a plain state that records the conversions: [(path, original type)]."""
VALID = (
    "expected tensors, numbers, text, bytes, NumPy numbers and arrays of numbers, and dicts, lists, tuples, "
    "sets and deques of these"
)
LEAVES = frozenset({float, bool, str, bytes, complex, type(None)})
"""Types that are saved unchanged, in addition to int up to LARGEST."""
LARGEST = 2**2000
"""torch.load(weights_only=True) reads integers of up to 255 bytes."""
DEEPEST = 100
SHOWN = 8
"""Number of keys of a path to show in a message."""
STRIDED = torch.strided
# Only these are restored: the name comes from a file, and the function of that name is called.
FACTORIES: dict[str, Callable[[], Any]] = {f.__name__: f for f in (int, float, list, dict, set, str, bool)}
NUMBERS = {
    name: np.dtype(name).type
    for name in (
        "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
    ).split()
}
TEXT = {"str_": np.str_, "bytes_": np.bytes_}
_HERE = object()


class UnsupportedValueError(Exception):
    """A value that cannot be saved: `what` describes it; `keys` leads to it, innermost key first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.keys: list[Any] = []

    @property
    def path(self) -> list[Any]:
        """The keys that lead to the value, outermost first."""
        return self.keys[::-1]


class Plain:
    """Converts values, and collects their tensors and the conversions."""

    def __init__(self, tensor: Callable[[Tensor], Any]) -> None:
        """`tensor(value)` returns the placeholder of a tensor."""
        self._put = tensor
        self.converted: list[tuple[list[Any], str]] = []
        """(keys that lead to the value, innermost first; original type), innermost values first."""

    def of(self, value: Any, depth: int = 0) -> Any:
        """Return the plain form of `value`. Raises UnsupportedValueError."""
        kind = type(value)
        if kind in LEAVES:
            # isascii() is fast, and ASCII text always has a UTF-8 encoding.
            return value if kind is not str or value.isascii() else _encodable(value)
        if isinstance(value, Tensor):
            if reason := unusual(value):
                raise UnsupportedValueError(f"{reason}; use a dense tensor, or leave it out of the state")
            return self._put(value.detach())
        if kind is int:
            if -LARGEST < value < LARGEST:
                return value
            raise UnsupportedValueError(f"an integer of {value.bit_length()} bits")
        if depth > DEEPEST:
            raise UnsupportedValueError(f"nested deeper than {DEEPEST} levels, or contains itself")
        if kind is dict:
            return self._dict(value, depth)
        if kind is list:
            return list(self._items(enumerate(value), depth))
        if kind is tuple:
            return tuple(self._items(enumerate(value), depth))
        return self._converted(value, kind, depth)

    def _items(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> Iterable[Any]:
        for key, item in pairs:
            kind = type(item)
            # Most items are numbers or tensors; this saves a call of `of` for them.
            if kind in LEAVES and kind is not str:
                yield item
                continue
            if kind is Tensor and not unusual(item):
                yield self._put(item.detach())
                continue
            before = len(self.converted)
            try:
                found = self.of(item, depth + 1)
            except UnsupportedValueError as error:
                error.keys.append(key)
                raise
            if len(self.converted) > before:
                for keys, _ in self.converted[before:]:
                    keys.append(key)
            yield found

    def _dict(self, value: Mapping[Any, Any], depth: int) -> dict[Any, Any]:
        keys = [_key(key) for key in value]
        return dict(zip(keys, self._items(zip(keys, value.values(), strict=True), depth), strict=True))

    def _converted(self, value: Any, kind: type, depth: int) -> Any:
        """Return the plain form of a value whose type must be restored.

        The conversion is recorded after those of the values inside it.
        """
        if kind is np.ndarray:
            plain = self._put(tensor_of(value))
            was = "ndarray"
        elif isinstance(value, np.generic):
            plain = _number(value)
            was = kind.__name__
            was = was if kind in TEXT.values() else value.dtype.name
        elif kind in (OrderedDict, Counter):
            plain = self._dict(value, depth)
            was = kind.__name__
            # A module's state_dict(); a plain dict also keeps its order.
            if depth == 0 and kind is OrderedDict:
                return plain
        elif kind is defaultdict:
            name = getattr(value.default_factory, "__name__", "")
            if value.default_factory is not None and FACTORIES.get(name) is not value.default_factory:
                raise UnsupportedValueError(
                    f"a defaultdict whose default_factory is {name or 'unnamed'}; use a dict"
                )
            plain = self._dict(value, depth)
            was = f"defaultdict:{name}"
        elif kind is deque:
            plain = list(self._items(enumerate(value), depth))
            was = f"deque:{'' if value.maxlen is None else value.maxlen}"
        elif kind in (set, frozenset):
            # A fixed order gives equal states equal bytes; repr orders mixed types.
            plain = sorted((_key(item) for item in value), key=repr)
            was = kind.__name__
        elif kind is bytearray:
            plain = bytes(value)
            was = "bytearray"
        elif kind is torch.Size:
            plain = tuple(value)
            was = "Size"
        elif isinstance(value, torch.dtype):
            plain = str(value).removeprefix("torch.")
            was = "dtype"
        elif isinstance(value, torch.device):
            plain = str(value)
            was = "device"
        else:
            raise UnsupportedValueError(_named(value, kind))
        self.converted.append(([], was))
        return plain


def restored(state: dict[Any, Any]) -> dict[Any, Any]:
    """Restore the original types in `state`, in place. Raises ValueError if TYPES does not match."""
    tree: dict[Any, Any] = {}
    try:
        for path, was in state.pop(TYPES, ()):
            branch = tree
            for key in path:
                branch = branch.setdefault(key, {})
            branch[_HERE] = was
        _put_back(state, tree)
    # The state comes from a file, so its types and paths may be anything.
    except (TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise ValueError(f"its {TYPES} do not match the state: {type(error).__name__}") from error
    return state


def _put_back(value: Any, tree: dict[Any, Any]) -> Any:
    was = tree.pop(_HERE, None)
    if tree:
        items = list(value) if isinstance(value, tuple) else value
        for key, branch in tree.items():
            items[key] = _put_back(items[key], branch)
        value = tuple(items) if isinstance(value, tuple) else items
    return value if was is None else _as_it_was(value, was)


def _as_it_was(plain: Any, was: str) -> Any:
    name, _, detail = was.partition(":")
    if was == "ndarray":
        return plain.numpy()
    if was in NUMBERS or was in TEXT:
        return (NUMBERS.get(was) or TEXT[was])(plain)
    if name == "defaultdict":
        return defaultdict(FACTORIES[detail] if detail else None, plain)
    if name == "deque":
        return deque(plain, int(detail) if detail else None)
    if was == "dtype":
        found = getattr(torch, plain)
        # The name comes from a file, and torch has many attributes that are not dtypes.
        if not isinstance(found, torch.dtype):
            raise LookupError(plain)
        return found
    makers: dict[str, Callable[[Any], Any]] = {
        "OrderedDict": OrderedDict,
        "Counter": Counter,
        "set": set,
        "frozenset": frozenset,
        "bytearray": bytearray,
        "Size": torch.Size,
        "device": torch.device,
    }
    return makers[was](plain)


def tensor_of(array: "np.ndarray[Any, Any]") -> Tensor:
    """Convert an array to a tensor, without a copy if torch can use its memory.

    Raises UnsupportedValueError.
    """
    if array.dtype.newbyteorder("=").name not in NUMBERS:
        raise UnsupportedValueError(f"a NumPy array of dtype {array.dtype}")
    # torch.from_numpy rejects negative strides and foreign byte orders, and warns about read-only arrays.
    usable = array.flags.writeable and array.dtype.isnative and all(stride >= 0 for stride in array.strides)
    if not usable or any(stride % array.itemsize for stride in array.strides):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(array)


def unusual(tensor: Tensor) -> str:
    """Describe a tensor that is not dense, strided and in memory; "" for one that is."""
    if tensor.layout is not STRIDED:
        return f"a tensor of layout {str(tensor.layout).removeprefix('torch.')}"
    if tensor.is_meta:
        return "a tensor on the meta device, without values"
    if tensor.is_quantized:
        return "a quantized tensor"
    return "a nested tensor" if tensor.is_nested else ""


def format_path(path: Iterable[Any]) -> str:
    """Format a path: ["a", 0, "b"] -> "a[0]['b']"."""
    first, *rest = list(path)[:SHOWN]
    return f"{first}{''.join(f'[{key!r}]' for key in rest)}"


def _number(value: "np.generic[Any]") -> Any:
    plain = value.item()
    if value.dtype.name not in NUMBERS and type(value) not in TEXT.values():
        raise UnsupportedValueError(f"a NumPy {value.dtype.name}")
    return _encodable(plain) if isinstance(plain, str) else plain


def _key(key: Any) -> Any:
    """Return a plain key of a dict or item of a set; a NumPy number equals its Python number as a key."""
    kind = type(key)
    if kind is str:
        return key if key.isascii() else _encodable(key)
    if kind in LEAVES or (kind is int and -LARGEST < key < LARGEST):
        return key
    if kind is tuple:
        return tuple(map(_key, key))
    if isinstance(key, np.generic):
        return _number(key)
    raise UnsupportedValueError(f"a dict or set in which a key or item is {_named(key, kind)}")


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnsupportedValueError("text with lone surrogates, which UTF-8 cannot encode") from None
    return text


def _named(value: object, kind: type) -> str:
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a namedtuple ({module}{kind.__qualname__}); use tuple(...) or ._asdict()"
    return f"of type {module}{kind.__qualname__}"
