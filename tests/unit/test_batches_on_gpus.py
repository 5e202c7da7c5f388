"""Batches of every kind on their way to a (played) GPU, and what a step there does not wait for."""

import math
from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

from played_gpu import Notes
from tandem.data import loader
from tandem.data.loader import batch_size_of, moved, parts_of, to_device
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.errors import ConfigError
from tandem.training.buffers import KeptBuffers
from tandem.training.nonfinite import Guard
from tandem.training.train_state import on_their_devices

GPU, META = torch.device("cuda", 0), torch.device("meta")
Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Rows:
    x: torch.Tensor
    name: str = "rows"
    parts: list[torch.Tensor] = field(default_factory=list)


KINDS = [
    UserDict(x=torch.zeros(2), more={"y": torch.zeros(2)}),
    Rows(torch.zeros(2), parts=[torch.zeros(2)]),
    Pair(torch.zeros(2), torch.zeros(2)),
    {"x": torch.zeros(2), "name": "rows", "y": (torch.zeros(2), [])},
]


def tensors(batch: Any) -> list[torch.Tensor]:
    return list(loader.tensors_of(batch))


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
def test_a_batch_of_any_kind_moves_and_stays_what_it_is(batch: Any) -> None:
    there = to_device(batch, META)
    assert type(there) is type(batch) and [each.device for each in tensors(there)] == [META] * 2
    assert [each.device.type for each in tensors(batch)] == ["cpu"] * 2, "the dataset's own is left alone"
    assert batch_size_of(batch) == 2 and [batch_size_of(part) for part in parts_of(batch, (1, 1))] == [1, 1]


def test_what_is_no_tensor_is_not_counted() -> None:
    assert batch_size_of({"name": "abc", "x": torch.zeros(3)}) == 3
    with pytest.raises(ConfigError, match="a batch has no tensor"):
        batch_size_of({"name": "abc"})


@pytest.mark.parametrize("batch", KINDS, ids=lambda batch: type(batch).__name__)
def test_a_batch_goes_pinned_and_beside_the_step(batch: Any, gpu: Notes) -> None:
    moved(batch, GPU)
    assert gpu.counts["pinned copy"] == {"data/loader.py:move": 2} == gpu.counts["record_stream"]
    assert gpu.counts["copy"] == {"data/loader.py:move": 2}
    assert gpu.counts["wait of a stream"] == {"data/loader.py:moved": 1}
    assert "wait" not in gpu.counts


def test_what_is_on_a_device_already_is_not_pinned(gpu: Notes) -> None:
    with pytest.raises(NotImplementedError, match="meta"):  # played by meta, whose tensors cannot be copied
        moved([torch.zeros(2, device=META)], GPU)
    assert "pinned copy" not in gpu.counts and gpu.counts["copy"] == {"data/loader.py:move": 1}


def guard(policy: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Guard:
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    strategy = strategies.load("single", ProcessGroup(Position(), torch.device("cpu")))
    return Guard(policy, strategy, model, optimizer, scaler, GPU)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_told_on_the_device_with_and_without_momentum(momentum: float, gpu: Notes) -> None:
    """Without momentum it has no state, ever, and the host waited in each step for it."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, fused=True)
    guarded = guard("stop", model, optimizer)
    for step in range(3):
        guarded.begin_step()
        model(torch.ones(1, 3)).sum().backward()
        before = model.weight.detach().clone()
        gpu.counts.clear()
        guarded.update(torch.tensor(float(step == 1)), lambda: None)
        assert torch.equal(before, model.weight) is (step == 1)
        assert "wait" not in gpu.counts or (step == 0 and momentum)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None])
def test_a_gradient_that_is_not_finite_is_found_without_a_wait(bad: float | None, gpu: Notes) -> None:
    model = nn.ParameterList([torch.ones(3), torch.ones(0), torch.ones(2, 2, dtype=torch.complex64)])
    guarded = guard("stop", model, torch.optim.SGD(model.parameters(), lr=0.1))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    if bad is not None:
        model[2].grad[1, 1] = bad
    gpu.counts.clear()
    before = [parameter.grad.clone() for parameter in model]
    found = guarded.look()
    assert "wait" not in gpu.counts
    assert found.shape == () and found == (bad is not None)
    same = [torch.equal(a.nan_to_num(), p.grad.nan_to_num()) for a, p in zip(before, model, strict=True)]
    assert all(same)


def test_a_step_left_out_puts_buffers_back_in_one_piece(gpu: Notes) -> None:
    # Between two of them what comes is not normalized, so each one's mean moves.
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.BatchNorm1d(3), nn.Linear(3, 3))))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    guarded = guard("skip", model, optimizer)
    before = [buffer.clone() for buffer in model.buffers()]
    for found in (1.0, 0.0):
        guarded.begin_step()
        model(torch.randn(5, 3)).sum().backward()
        guarded.update(torch.tensor(found), lambda: None)
        same = [torch.equal(*pair) for pair in zip(before, model.buffers(), strict=True)]
        assert all(same) is bool(found) and any(same) is bool(found)


def test_buffers_that_a_forward_pass_replaces_are_put_back() -> None:
    model = nn.BatchNorm1d(2)
    kept = KeptBuffers(model.modules)
    kept.keep()
    model.running_mean = model.running_mean + 1
    model.num_batches_tracked.add_(3)
    kept.put_back(torch.tensor(1.0))
    assert model.running_mean.tolist() == [0.0, 0.0] and model.num_batches_tracked == 0
    KeptBuffers(nn.Linear(1, 1).modules).put_back()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adams_step_of_a_cpus_checkpoint_goes_where_a_fused_kernel_looks(kind: Any) -> None:
    here = nn.Parameter(torch.zeros(3))
    saved = kind([here])
    here.grad = torch.ones(3)
    saved.step()
    there = nn.Parameter(torch.zeros(3, device=META))
    optimizer = kind([there])
    optimizer.param_groups[0]["fused"] = True  # as on a GPU
    groups = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(saved.state_dict())
    on_their_devices(optimizer, groups)
    assert optimizer.param_groups[0]["fused"] is True
    assert optimizer.state[there]["step"].device == META == optimizer.state[there]["exp_avg"].device


