"""What a loop of one's own keeps and logs: NumPy's numbers are numbers, and a kept value stays what it is."""

import decimal
import fractions
import random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tandem.custom_loop.backward import LoggedValues
from tandem.custom_loop.kept import KeptState, KeptValues
from tandem.distributed.group import ProcessGroup
from tandem.errors import ConfigError


class Alone:
    size, rank, is_first = 1, 0, True

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]


ALONE = cast(ProcessGroup, Alone())


class Thing:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return {"state": self.state}

    def load_state_dict(self, state: Any) -> None:
        self.state = state["state"]


def state_of(kept: KeptValues, *per_rank: str) -> KeptState:
    return KeptState(kept, [kept.model], ALONE, per_rank)


NUMBERS = [
    np.float32(0.5),
    np.float64(0.5),
    np.float16(0.5),
    np.int64(3),
    np.uint8(3),
    np.bool_(True),
    np.array(0.5),
    np.array([0.5], np.float32),
    torch.tensor(0.5),
    torch.tensor([3]),
    0.5,
    3,
    True,
]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_a_kept_number_takes_any_number_and_stays_pythons(value: Any) -> None:
    kept = KeptValues(model=nn.Linear(2, 2), best=np.float32(0.25) if isinstance(value, np.generic) else 0.25)
    state = state_of(kept)
    kept.best = value
    assert type(kept.best) in (bool, int, float) and kept.best == value
    other = KeptValues(model=nn.Linear(2, 2), best=0.0)
    state_of(other).load(state.full_state(), state.per_rank_state())
    assert other.best == kept.best


@pytest.mark.parametrize(
    "value",
    [None, "1", 1j, torch.ones(2), np.ones(2), nn.Linear(1, 1), np.longdouble(1), torch.tensor(1j)],
    ids=repr,
)
def test_a_kept_number_that_becomes_something_else_is_one_line(value: Any) -> None:
    kept = KeptValues(model=nn.Linear(2, 2), best=0.0)
    with pytest.raises(ConfigError) as caught:
        kept.best = value
    assert "'best'" in str(caught.value) and "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert kept.best == 0.0


@pytest.mark.parametrize(
    "value",
    [torch.ones(4), torch.ones(3, dtype=torch.float64), np.ones(3), 1.0, None, nn.Linear(1, 1)],
    ids=repr,
)
def test_a_kept_tensor_keeps_its_form(value: Any) -> None:
    kept = KeptValues(model=nn.Linear(2, 2), seen=torch.zeros(3))
    state = state_of(kept)
    kept.seen = torch.full((3,), 2.0)
    kept.seen = np.full(3, 3.0, np.float32)
    assert isinstance(kept.seen, torch.Tensor) and state.full_state()["tensors"]["seen"].tolist() == [3.0] * 3
    with pytest.raises(ConfigError, match="seen"):
        kept.seen = value


def test_a_kept_tensor_that_grows_in_place_is_refused_at_the_save() -> None:
    kept = KeptValues(model=nn.Linear(2, 2), seen=torch.zeros(3))
    state = state_of(kept)
    kept.seen.resize_(5)
    with pytest.raises(ConfigError, match="seen"):
        state.full_state()


def test_an_array_is_kept_and_restored_in_place() -> None:
    arrays = [np.zeros((2, 3)), np.zeros(4, np.int32)[::-1], np.zeros(3, ">f4")]
    kept = KeptValues(model=nn.Linear(2, 2), a=arrays[0], b=arrays[1], c=arrays[2])
    state = state_of(kept)
    for array in arrays:
        array += 2
    saved = {part: dict(value) for part, value in state.full_state().items()}
    saved["tensors"] = {name: value.clone() for name, value in saved["tensors"].items()}
    for array in arrays:
        array[...] = 0
    state.load(saved, {})
    assert all((array == 2).all() for array in arrays) and kept.a is arrays[0]


@pytest.mark.parametrize(
    "value", [np.array(["a"]), np.array([None]), np.broadcast_to(np.ones(1), (3,))], ids=repr
)
def test_an_array_that_cannot_be_restored_is_refused_at_once(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"run.keep\(odd"):
        state_of(KeptValues(model=nn.Linear(2, 2), odd=value))


def test_what_cannot_be_saved_is_named_with_its_place() -> None:
    with pytest.raises(ConfigError) as caught:
        state_of(KeptValues(model=nn.Linear(2, 2), env=Thing({"a": [decimal.Decimal(1)]})))
    assert "env['state']['a'][0]" in str(caught.value) and "decimal.Decimal" in str(caught.value)
    with pytest.raises(ConfigError, match=r"env\['state'\]"):
        state_of(KeptValues(model=nn.Linear(2, 2), env=Thing(decimal.Decimal(1))), "env")


GENERATORS: list[Any] = [
    (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(3, generator=g).tolist()),
    (lambda: np.random.default_rng(3), lambda g: g.normal(size=3).tolist()),
    (lambda: np.random.Generator(np.random.MT19937(3)), lambda g: g.normal(size=3).tolist()),
    (lambda: np.random.RandomState(3), lambda g: g.normal(size=3).tolist()),
    (lambda: random.Random(3), lambda g: [g.gauss(0, 1) for _ in range(3)]),
]


@pytest.mark.parametrize("make, draw", GENERATORS)
@pytest.mark.parametrize("per_rank", [[], ["rng"]])
def test_random_generators_can_be_kept(make: Any, draw: Any, per_rank: list[str]) -> None:
    from tandem.checkpoint.state import deserialize, serialize

    kept = KeptValues(model=nn.Linear(2, 2), rng=make())
    state = state_of(kept, *per_rank)
    draw(kept.rng)
    saved = deserialize(serialize({**state.full_state(), "per_rank": state.per_rank_state()}))
    following = draw(kept.rng)
    state.load(saved, saved["per_rank"])
    assert draw(kept.rng) == following


LOGGED = [*NUMBERS, decimal.Decimal("0.5"), fractions.Fraction(1, 2), np.array([[1]]), float("nan")]


@pytest.mark.parametrize("value", LOGGED, ids=repr)
def test_any_number_can_be_logged(value: Any) -> None:
    numbers = LoggedValues(ALONE)
    numbers.add("accuracy", value)
    total, count = numbers._sums["accuracy"]
    assert count == 1 and (float(total) == float(np.asarray(value).item()) or value != value)


@pytest.mark.parametrize(
    "value", ["0.5", None, 1j, np.ones(2), torch.ones(2), np.complex64(1), [0.5], 10**400], ids=repr
)
def test_what_is_no_number_cannot_be_logged(value: Any) -> None:
    with pytest.raises(ConfigError, match="accuracy") as caught:
        LoggedValues(ALONE).add("accuracy", value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [nn.Linear, torch.optim.SGD, torch.Generator, np.ndarray, int])
def test_a_class_is_refused_by_its_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"value=.*class {value.__name__}"):
        state_of(KeptValues(model=nn.Linear(2, 2), value=value))


def test_a_name_that_is_not_kept_is_refused_with_the_kept_ones() -> None:
    kept = KeptValues(model=nn.Linear(2, 1), best=0.0)
    with pytest.raises(ConfigError, match="'bets'.*best"):
        kept.bets = 1.0
    with pytest.raises(ConfigError, match="'epoch'.*kept: model, best"):
        kept.epoch = 3
    assert vars(kept).keys() == {"model", "best"}


class Copying:
    """Its state is a copy of a module's tensors, in another arrangement."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def state_dict(self) -> Any:
        return [tensor.clone() for tensor in self.module.state_dict().values()]

    def load_state_dict(self, state: Any) -> None: ...


def test_a_wrapped_model_that_no_value_contains_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for values in ({"optimizer": optimizer}, {"first": model[0], "best": 0.5}, {"other": nn.Linear(4, 4)}):
        with pytest.raises(ConfigError, match=r"wrapped Sequential.*run.keep\(model=model"):
            KeptState(KeptValues(**values), [model], ALONE)


@pytest.mark.parametrize("values", [
    lambda model: {"net": model},
    lambda model: {"outer": nn.ModuleDict({"inner": model})},
    lambda model: {"a": model[0], "b": model[1]},
    lambda model: {"trainer": Copying(model)},
    lambda model: {f"p{at}": parameter for at, parameter in enumerate(model.parameters())},
], ids=["itself", "inside", "parts", "object", "tensors"])  # fmt: skip
def test_a_wrapped_model_may_be_kept_in_any_form(values: Any) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    KeptState(KeptValues(**values(model)), [model], ALONE)


def test_only_trained_weights_of_a_wrapped_model_have_to_be_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
    KeptState(KeptValues(head=model[1]), [model], ALONE)
