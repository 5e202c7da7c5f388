"""What --strategy dp computes with: parts of a batch by GPU, whose gradients add up to those of the whole."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tandem.config import Settings
from tandem.data.loader import batch_size_of, parts_of
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.strategy.dp import Balanced, limits, shares_of_devices
from tandem.tasks.base import TaskWithDefaults
from tandem.training.step import TrainingModule

CPU = torch.device("cpu")


class Squares:
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        out = model(batch["x"])
        return nn.functional.mse_loss(out, batch["y"]), {"hits": ((out > 0).sum(), len(out))}


def batch_of(samples: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 5, generator=generator)
    return {"x": x, "y": x.sum(1, keepdim=True), "scale": torch.tensor(2.0), "name": "rows"}


@given(st.integers(1, 300), st.integers(1, 8), st.floats(0.01, 1.0))
def test_every_gpu_but_the_first_computes_alike(samples: int, devices: int, first: float) -> None:
    sizes = shares_of_devices(samples, devices, first)
    assert sum(sizes) == samples and len(sizes) == min(samples, devices) and min(sizes) >= 1
    others = sizes[1:]
    if others:
        assert max(others) - min(others) <= 1 and sizes[0] <= max(others) + 1
        ideal = samples * first / (first + len(others))
        assert ideal < 1 or abs(sizes[0] - ideal) < 1 + 1e-6


@given(st.integers(1, 60), st.integers(1, 8), st.floats(0.01, 1.0))
def test_the_parts_are_the_batch(samples: int, devices: int, first: float) -> None:
    batch = batch_of(samples)
    sizes = shares_of_devices(samples, devices, first)
    parts = parts_of(batch, sizes)
    assert [batch_size_of(part) for part in parts] == list(sizes)
    for name in ("x", "y"):
        assert torch.equal(torch.cat([part[name] for part in parts]), batch[name])
    assert all(part["scale"] is batch["scale"] and part["name"] == "rows" for part in parts)


def test_nested_batches_keep_their_kind() -> None:
    pair = namedtuple("pair", "a b")
    batch = [pair(torch.arange(5), (torch.ones(5, 2), None)), {"mask": torch.ones(3, 3)}]
    first, second = parts_of(batch, (2, 3))
    assert first[0].a.tolist() == [0, 1] and second[0].a.tolist() == [2, 3, 4]
    assert type(second[0]) is pair and second[0].b[0].shape == (3, 2) and second[0].b[1] is None
    assert first[1]["mask"].shape == (3, 3)  # of no sample: every part has it whole


@given(st.integers(1, 40), st.integers(1, 6), st.floats(0.05, 1.0))
def test_losses_of_the_parts_add_up_to_the_gradient_of_one_process(
    samples: int, devices: int, first: float
) -> None:
    torch.manual_seed(0)
    model = nn.Linear(5, 1)
    module = TrainingModule(TaskWithDefaults(Squares()), model, CPU, "fp32", 1, samples)  # type: ignore[arg-type]
    module.names[:] = ["hits"]
    batch = batch_of(samples)

    def step(parts: list[Any]) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        outcomes = [module(part) for part in parts]
        torch.stack([loss for loss, _ in outcomes]).sum().backward()
        return torch.stack([numbers for _, numbers in outcomes]).sum(0), [
            p.grad.clone() for p in model.parameters() if p.grad is not None
        ]

    numbers, gradients = step([batch])
    their_numbers, theirs = step(parts_of(batch, shares_of_devices(samples, devices, first)))
    torch.testing.assert_close(their_numbers, numbers, rtol=1e-6, atol=2e-6)
    for mine, one in zip(gradients, theirs, strict=True):
        torch.testing.assert_close(one, mine, rtol=1e-6, atol=2e-6)


def test_scatter_gives_each_gpu_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, str]] = []

    def to_device(part: Any, device: torch.device) -> Any:
        moved.append((batch_size_of(part), str(device)))
        return part

    monkeypatch.setattr("tandem.distributed.strategy.dp.to_device", to_device)
    balanced = Balanced(nn.Identity(), [], first_share=0.5)
    inputs, named = balanced.scatter((batch_of(35),), {}, [0, 1, 2, 3])
    assert moved == [(5, "cuda:0"), (10, "cuda:1"), (10, "cuda:2"), (10, "cuda:3")]
    assert len(inputs) == len(named) == 4 and all(len(arguments) == 1 for arguments in inputs)
    inputs, _ = balanced.scatter((batch_of(2),), {}, [0, 1, 2, 3])
    assert [batch_size_of(part) for (part,) in inputs] == [1, 1]


def test_without_two_gpus_it_says_that_nothing_is_split(caplog: pytest.LogCaptureFixture) -> None:
    strategy = strategies.load("dp", ProcessGroup(Position(), CPU))
    module = nn.Identity()
    strategy.wrap(module, 4)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "there is no GPU here, so nothing is split" in record.message
    assert "there is 1 GPU here" in limits([0], 1.0)
    assert all("\n" not in limits(devices, 0.5) for devices in ([], [0], [0, 1]))
    assert "2 GPUs" in limits([0, 1], 0.5) and "0.5 of another GPU's work" in limits([0, 1], 0.5)


def test_a_first_share_is_for_dp_alone() -> None:
    compute = Settings().replace(strategy="dp:0.5").compute
    assert compute.strategy_name == "dp" and compute.dp_first_share == 0.5
    strategy = strategies.load(compute.strategy, ProcessGroup(Position(), CPU), compute=compute)
    assert isinstance(strategy, type(strategies.load("dp", ProcessGroup(Position(), CPU))))


@pytest.mark.parametrize("value", ["0", "1.1", "-1", "nan"])
def test_a_first_share_is_above_0_and_up_to_1(value: str) -> None:
    with pytest.raises(Exception, match="strategy.*a share > 0 and <= 1"):
        Settings.from_dict({"strategy": f"dp:{value}"})
