"""A state too large to stand in memory twice: read from its file into the model, hashed around that."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tandem.checkpoint import state as state_module
from tandem.checkpoint.state import deserialize, deserialize_file, destinations_by_index, flatten, serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import address
from tandem.errors import CheckpointError, CorruptCheckpointError

STEP = 7


def state() -> dict[str, Any]:
    """Of a model with a tied weight, an optimizer that has stepped, and what is no tensor."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": STEP, "log": {"a": 1.5}}


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointStore:
    monkeypatch.setattr(state_module, "LARGE_BYTES", 1)
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(STEP, serialize(state()), {"eval": {"accuracy": 0.5}})
    return store


def read(store: CheckpointStore, destinations: dict[str, Tensor]) -> dict[str, Any]:
    path = state_module.large_file_of(store, STEP)
    assert path is not None
    found, info = state_module.read_in_place(
        store, STEP, path, lambda file: deserialize_file(file, destinations)
    )
    assert info == {"eval": {"accuracy": 0.5}}
    return found


def test_what_is_read_is_what_was_saved_and_the_model_has_its_part(store: CheckpointStore) -> None:
    destinations = {name: torch.zeros_like(value) for name, value in state()["model"].items()}
    found = read(store, destinations)
    (bare, tensors), (wanted, originals) = flatten(found), flatten(state())
    assert bare == wanted and all(map(torch.equal, tensors, originals))
    assert all(found["model"][name] is destination for name, destination in destinations.items())


def test_a_tensor_of_another_form_gets_memory_of_its_own(store: CheckpointStore) -> None:
    """A model of another shape or type is told so afterwards, by who loads the state."""
    destinations = {
        "0.bias": torch.zeros(5),
        "1.weight": torch.zeros(4, dtype=torch.float64),
        "more": torch.ones(1),
    }
    found = read(store, destinations)
    assert torch.equal(found["model"]["0.bias"], state()["model"]["0.bias"])
    assert found["model"]["1.weight"].dtype == torch.float32 and destinations["1.weight"].sum() == 0
    read(store, {"0.weight": nn.Parameter(torch.zeros(4, 4)).detach()})


def test_nothing_of_it_is_the_files_afterwards(store: CheckpointStore) -> None:
    """The file may be pruned, or cut off by whoever damages it, while the run goes on with the state."""
    found, path = read(store, {}), state_module.large_file_of(store, STEP)
    assert path is not None
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert all(map(torch.equal, flatten(found)[1], flatten(state())[1]))


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [flip, lambda path: path.write_bytes(path.read_bytes()[:-9]), Path.unlink])
def test_a_damaged_one_is_not_even_looked_at(store: CheckpointStore, harm: Callable[[Path], object]) -> None:
    path = state_module.large_file_of(store, STEP)
    assert path is not None
    harm(path)
    with pytest.raises(CorruptCheckpointError):
        state_module.read_in_place(store, STEP, path, lambda _: pytest.fail("used"))


def test_one_that_changes_while_it_is_loaded_is_not_taken(store: CheckpointStore) -> None:
    path = state_module.large_file_of(store, STEP)
    assert path is not None
    with pytest.raises(CheckpointError, match="changed while .*state.pt") as told:
        state_module.read_in_place(store, STEP, path, flip)
    assert not isinstance(told.value, CorruptCheckpointError)


def test_small_ones_and_those_of_an_object_store_are_not_for_this(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert state_module.large_file_of(store, STEP) is not None
    elsewhere = CheckpointStore(address("s3://bucket/run/checkpoints"))
    with monkeypatch.context() as patched:
        patched.setattr(elsewhere, "manifest", lambda step: pytest.fail("a request"))
        assert state_module.large_file_of(elsewhere, STEP) is None
    state_module.LARGE_BYTES = 10**9  # put back by the fixture's monkeypatch
    assert state_module.large_file_of(store, STEP) is None


@pytest.mark.parametrize("raw", [b"", b"PK", b"PK\3\4" + bytes(99), b"not an archive at all"])
def test_what_is_no_state_is_one_line(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="the checkpoint's state"):
        deserialize_file(path, {})
    with pytest.raises(CheckpointError, match="the checkpoint's state"):
        deserialize(raw)


def test_a_models_tensors_are_found_by_name() -> None:
    skeleton, tensors = flatten({"first": torch.ones(1), **state()})
    destinations = {name: torch.zeros(1) for name in (*state()["model"], "more")}
    found = destinations_by_index(skeleton, destinations)
    assert list(found) == list(range(1, 1 + len(state()["model"])))
    for place, name in enumerate(state()["model"], start=1):
        assert found[place] is destinations[name] and torch.equal(tensors[place], state()["model"][name])
    assert destinations_by_index(flatten({"step": 1})[0], destinations) == {}
    assert destinations_by_index(skeleton, {}) == {}
