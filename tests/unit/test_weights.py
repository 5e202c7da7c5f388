"""`--init-from`: what a file may be, whose names are taken for the model's, and what is refused."""

import argparse
import os
import re
from collections import OrderedDict
from pathlib import Path, PurePath
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tandem.checkpoint.state import deserialize, serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.distributed.strategy.single import SingleStrategy
from tandem.errors import ConfigError
from tandem.training.weights import PREFIXES, InitialWeights, match_weights, read_weights, tensors_in


class Net(nn.Module):
    """Two layers, a batch norm, and a weight that two names share."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, classes)
        self.tied = self.head


def single() -> SingleStrategy:
    return SingleStrategy(
        cast(Any, argparse.Namespace(size=1, devices=[])), ExchangeConfig(), ComputeConfig()
    )


def state_of(seed: int = 5, classes: int = 3) -> dict[str, Any]:
    torch.manual_seed(seed)
    return dict(Net(classes).state_dict())


def read(place: PurePath | str, download: bool = False) -> dict[str, Any]:
    return deserialize(read_weights(PurePath(place) if isinstance(place, str) else place, download))


@pytest.mark.parametrize("container", [None, "state_dict", "model_state_dict", "model", "both"])
@pytest.mark.parametrize(
    "prefix", ["", "module.", "_orig_mod.", "model.", "module._orig_mod.", "model.module."]
)
def test_containers_and_prefixes(tmp_path: Path, container: str | None, prefix: str) -> None:
    mine = state_of()
    saved: Any = OrderedDict((prefix + name, value) for name, value in mine.items())
    if container == "both":
        saved = {"model": {"state_dict": saved, "epoch": 3}, "epoch": torch.tensor(3)}
    elif container is not None:
        saved = {container: saved, "optimizer": {"state": {}}, "epoch": 3}
    torch.save(saved, tmp_path / "weights.pth")
    model = Net()
    InitialWeights(read(tmp_path / "weights.pth"), tmp_path, True).load(single(), model)
    assert all(torch.equal(value, mine[name]) for name, value in model.state_dict().items())


@given(st.lists(st.sampled_from(PREFIXES), max_size=4), st.lists(st.sampled_from(PREFIXES), max_size=2))
def test_any_wrapping_of_file_and_model_fits(theirs: list[str], mine: list[str]) -> None:
    model: nn.Module = Net()
    for prefix in reversed(mine):
        outer = nn.Module()
        outer.add_module(prefix.rstrip("."), model)
        model = outer
    wrapped = {"".join(theirs) + name: value for name, value in state_of().items()}
    found = match_weights(wrapped, model)
    assert found.share == 1 and not found.missing and not found.unexpected and not found.wrong_shaped


def test_names_that_could_mean_two_are_not_guessed() -> None:
    model = nn.ModuleDict({"model": nn.Linear(2, 2), "module": nn.Linear(2, 2)})
    found = match_weights(dict(nn.Linear(2, 2).state_dict()), model)
    assert found.share == 0 and len(found.missing) == 4 and len(found.unexpected) == 2
    exact = match_weights(dict(model.state_dict()), model)
    assert exact.share == 1 and not exact.missing


def test_another_head_loads_all_but_the_head_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save({**state_of(classes=10), "extra": torch.ones(1)}, tmp_path / "other.pt")
    model = Net()
    before = model.head.weight.clone()
    initial = InitialWeights(read(tmp_path / "other.pt"), tmp_path / "other.pt", False)
    with caplog.at_level("INFO"):
        initial.load(single(), model)
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.body[0].weight, state_of(classes=10)["body.0.weight"])
    body, whole = 4 * 8 + 8 + 8 + 8, 4 * 8 + 8 + 8 + 8 + 8 * 3 + 3
    assert caplog.messages[0].endswith(f"{body / whole:.1%} of the model's parameters ({body} of {whole})")
    table = {" ".join(line.split()[: -1 - line.count(" and ")]): line for line in caplog.messages[1:]}
    assert [re.match(r"  (.+?) +(\d+)", line).groups() for line in table.values()] == [  # type: ignore[union-attr]
        ("loaded", "7"), ("missing", "0"), ("unexpected", "1"), ("wrong shape", "4"),
    ]  # fmt: skip
    assert "head.weight is (10, 8) in the file but (3, 8) in the model" in caplog.messages[-1]
    assert caplog.messages[1].endswith("and 3 more")
    with pytest.raises(ConfigError, match=r"67\.5%.*--init-strict requires all \(head\.weight is \(10, 8\)"):
        InitialWeights(initial.tensors, initial.source, True).load(single(), model)


def test_a_hundred_percent_is_all(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3000, 1)
    with caplog.at_level("INFO"):
        InitialWeights({"weight": model.weight.detach()}, PurePath("most.pt"), False).load(single(), model)
    assert caplog.messages[0] == "starting from most.pt: 99.9% of the model's parameters (3,000 of 3,001)"


def test_what_loads_nothing_is_an_error() -> None:
    other = {name: value for name, value in nn.Linear(5, 5).state_dict().items()}
    with pytest.raises(ConfigError, match=r"has 0\.0% .*nothing can be loaded .*use weights of this model$"):
        InitialWeights(other, PurePath("other.pt"), False).load(single(), Net())


def test_safetensors(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    mine = {name: value for name, value in state_of().items() if not name.startswith("tied")}
    save_file(mine, tmp_path / "weights.safetensors")
    found = match_weights(read(tmp_path / "weights.safetensors"), Net())
    assert found.share == 1 and found.missing == ("tied.weight", "tied.bias")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "weights.safetensors").read_bytes()[:-9])
    with pytest.raises(ConfigError, match="not a valid safetensors file"):
        read(tmp_path / "cut.safetensors")


def test_a_run_and_a_step_of_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.open_for_writing()
    for step in (10, 20):
        store.save(step, serialize({"model": state_of(step), "step": step}), {"step": step})
    for place, seed in (
        ("run", 20),
        ("run/checkpoints", 20),
        ("run@10", 10),
        ("run/checkpoints/step-000000010", 10),
    ):
        assert torch.equal(read(tmp_path / place)["head.weight"], state_of(seed)["head.weight"]), place


class Hostile:
    """Unpickled, it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("zipped", [True, False])
def test_pickled_code_is_refused_unread(tmp_path: Path, zipped: bool) -> None:
    path = tmp_path / "hostile.pt"
    torch.save({**state_of(), "x": Hostile(tmp_path / "hit")}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(ConfigError, match="system.*save only the weights") as caught:
        read(path)
    assert "\n" not in str(caught.value) and not (tmp_path / "hit").exists()


@pytest.mark.parametrize(
    "content, expected",
    [
        (b"", "cannot"),
        (b"no weights", "cannot"),
        (b"\x80\x02]q\x00.", "cannot"),
        ([torch.ones(2)], "a list, expected a state_dict"),
        ({"epoch": 3, "lr": 0.1}, "no named tensors .found: epoch, lr."),
        ({}, "found: nothing"),
        ({"args": argparse.Namespace(lr=1)}, "argparse.Namespace"),
    ],
)
def test_files_that_hold_no_weights(tmp_path: Path, content: Any, expected: str) -> None:
    path = tmp_path / "file.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(ConfigError, match=expected) as caught:
        read(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


@given(st.binary(max_size=300))
def test_any_bytes_give_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "any.pt"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        read(path)
    assert "\n" not in str(caught.value)


def test_places_where_nothing_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist .*ResNet18_Weights.DEFAULT"):
        read(tmp_path / "gone.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="contains no checkpoint"):
        read(tmp_path / "empty")


def test_torchvision_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    name = "ResNet18_Weights.DEFAULT"
    with pytest.raises(ConfigError, match=r"resnet18-f37072fd.pth does not exist; .*--download"):
        read(name)
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    torch.save(state_of(), folder / "resnet18-f37072fd.pth")
    for each in (
        name,
        f"torchvision:{name}",
        "ResNet18_Weights",
        "torchvision:ResNet18_Weights.IMAGENET1K_V1",
    ):
        assert torch.equal(read(each)["head.weight"], state_of()["head.weight"])
    with pytest.raises(ConfigError, match=r"no such weights; did you mean ResNet18_Weights\.IMAGENET1K_V1"):
        read("ResNet18_Weights.IMAGENET_V1")
    with pytest.raises(ConfigError, match=r"no such weights; did you mean ResNet\w+_Weights"):
        read("ResNet81_Weights")


def test_a_download_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torchvision")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))

    def unreachable(*_: Any, **__: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(torch.hub, "download_url_to_file", unreachable)
    with pytest.raises(ConfigError, match="could not be downloaded .*no route to host.*put the file at"):
        read("ResNet18_Weights.DEFAULT", download=True)


def test_tensors_in_keeps_tensors_alone() -> None:
    assert list(tensors_in({"a": torch.ones(1), "_extra_state": {"x": 1}, "version": 3})) == ["a"]
