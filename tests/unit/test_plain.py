"""What a state may hold: what comes back from a file or from memory is what was given, or it is refused."""

import array
import datetime
import decimal
import enum
import io
import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from whole_snapshots import newest_snapshot

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.plain import DEEPEST, restored
from tandem.checkpoint.snapshot import Snapshots
from tandem.checkpoint.state import deserialize, flatten, serialize, unflatten
from tandem.errors import ConfigError, UnloadableError

VALUES: dict[str, Any] = {
    "float64": np.float64(0.1),
    "float32": np.float32(0.1),
    "float16": np.float16(0.1),
    "int64": np.int64(-3),
    "uint8": np.uint8(200),
    "bool_": np.bool_(True),
    "complex64": np.complex64(1 + 2j),
    "str_": np.str_("h\u00e9"),
    "an array": np.arange(6.0).reshape(2, 3),
    "an array of bools": np.array([True, False]),
    "an array of uint32": np.array([1, 2], np.uint32),
    "a reversed array": np.arange(4)[::-1],
    "a read-only array": np.broadcast_to(np.ones(1, np.float32), (3,)),
    "an empty array": np.zeros((0, 2)),
    "an array without dimensions": np.array(3),
    "every second": np.arange(8)[::2],
    "bytearray": bytearray(b"\x00ab"),
    "bytes": b"\xff\x00",
    "OrderedDict": OrderedDict([("b", 1), ("a", np.float32(2))]),
    "Counter": Counter("aab"),
    "defaultdict": defaultdict(int, {"a": 1}),
    "a defaultdict of lists": defaultdict(list, {"a": [np.ones(2)]}),
    "a defaultdict without a factory": defaultdict(None, {"a": 1}),
    "deque": deque([1, (np.float32(2),), np.ones(1)], maxlen=5),
    "an endless deque": deque([1]),
    "set": {3, 1, "b"},
    "frozenset": frozenset({(1, 2)}),
    "Size": torch.Size([2, 3]),
    "dtype": torch.bfloat16,
    "device": torch.device("cpu"),
    "complex": 2j,
    "a large integer": 2**1999,
    "None": None,
    "text": "h\u00e9",
    "nested": (1, [np.ones(2)], {"k": (np.int64(1), [np.float32(1)])}),
    "PCG64": np.random.default_rng(1).bit_generator.state,
    "MT19937": np.random.Generator(np.random.MT19937(1)).bit_generator.state,
    "RandomState": np.random.RandomState(1).get_state(),
    "random": random.Random(1).getstate(),
    "a tensor of NumPy's keys": {np.int64(7): torch.ones(2, dtype=torch.bfloat16)},
}


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    return deserialize(serialize(state))


def through_memory(state: dict[str, Any]) -> dict[str, Any]:
    regions = [NodeMemory()]
    Snapshots(regions, 0, None).take(1, state, own=())
    found = newest_snapshot(regions)
    assert found is not None
    return found.state


def through_pieces(state: dict[str, Any]) -> dict[str, Any]:
    skeleton, tensors = flatten(state)
    return restored(unflatten(skeleton, [tensor.clone() for tensor in tensors]))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other) and one.dtype == other.dtype
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and np.array_equal(one, other) and other.flags.writeable
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert getattr(one, "default_factory", None) == getattr(other, "default_factory", None)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple | deque):
        assert len(one) == len(other) and getattr(one, "maxlen", 0) == getattr(other, "maxlen", 0)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@pytest.mark.parametrize("way", [through_a_file, through_memory, through_pieces])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES.keys())
def test_a_value_comes_back_as_it_was(value: Any, way: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    assert_same(
        {"value": value, "deep": [{"value": value}]},
        way({"part": {"value": value, "deep": [{"value": value}]}})["part"],
    )


def test_a_file_has_plain_numbers_and_tensors_for_everybody() -> None:
    raw = serialize({"optimizer": {"lr": np.float64(0.1)}, "task": {"seen": np.arange(3)}})
    plain = torch.load(io.BytesIO(raw), weights_only=True)
    assert type(plain["optimizer"]["lr"]) is float and torch.equal(plain["task"]["seen"], torch.arange(3))


class Odd(enum.IntEnum):
    ONE = 1


class Dict(dict[str, int]):
    pass


Pair = namedtuple("Pair", "a b")
endless: list[Any] = []
endless.append(endless)
deep: list[Any] = []
for _ in range(DEEPEST + 5):
    deep = [deep]
REFUSED = {
    "namedtuple": Pair(1, 2),
    "Dict": Dict(),
    "array.array": array.array("d", [1.0]),
    "memoryview": memoryview(b"ab"),
    "decimal.Decimal": decimal.Decimal(1),
    "Odd": Odd.ONE,
    "ellipsis": ...,
    "range": range(3),
    "float128": np.longdouble(1),
    "datetime64": np.datetime64("2020"),
    "dtype <U1": np.array(["a"]),
    "dtype object": np.array([None]),
    "MaskedArray": np.ma.array([1]),
    "default_factory": defaultdict(lambda: 0),
    "Generator": torch.Generator(),
    "contains itself": endless,
    "nested deeper": deep,
    "surrogates": "\udc80",
    "3001 bits": 2**3000,
    "key": {decimal.Decimal(1): 1},
    "item": {decimal.Decimal(1), 2},
    "function": lambda: 1,
    "sparse_coo": torch.eye(2).to_sparse(),
    "meta": torch.empty(2, device="meta"),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "datetime.datetime": datetime.datetime(2020, 1, 1),
}


@pytest.mark.parametrize("name", REFUSED)
def test_everything_else_is_refused_by_its_place_and_type(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serialize({"step": 1, "objects": {"env": {"deep": [0, REFUSED[name]]}}})
    said = str(caught.value)
    assert "env['deep'][1]" in said and name in said and "\n" not in said and len(said) < 500
    assert caught.value.exit_code == 2


def test_a_tie_stays_one_and_what_is_expanded_or_overlaps_can_be_loaded() -> None:
    weight = torch.arange(1 << 19).float()
    state = {"model": {"a": weight, "b": weight, "part": weight[5:], "wide": weight[:1].expand(1 << 19)}}
    raw = serialize(state)
    assert len(raw) < 3.1 * weight.nbytes
    back = deserialize(raw)["model"]
    assert all(torch.equal(back[name], value) for name, value in state["model"].items())


@pytest.mark.parametrize(
    "notes",
    [[(("part", "x"), "code")], [(("part", "y"), "set")], [(("part", "x"), "ndarray")], "ab", [1], 7],
)
def test_notes_that_do_not_fit_make_no_state(notes: object) -> None:
    buffer = io.BytesIO()
    torch.save({"part": {"x": 1}, "tandem_types": notes}, buffer)
    with pytest.raises(UnloadableError) as caught:
        deserialize(buffer.getvalue())
    assert "\n" not in str(caught.value)
