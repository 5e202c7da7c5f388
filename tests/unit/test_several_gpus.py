"""A rank with several GPUs (--devices-per-rank): nothing is moved off them, and none of them is forgotten."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tandem.checkpoint.pinned import streams_of
from tandem.config.slices import ComputeConfig, ExchangeConfig
from tandem.data.seeds import seed_generators
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position
from tandem.distributed.strategy import ddp

CPU = torch.device("cpu")


class Stages(nn.Module):
    """`meta` plays the second GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2, device="meta")


def test_ddp_leaves_each_part_of_a_model_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped: list[nn.Module] = []
    monkeypatch.setattr(ddp, "DistributedDataParallel", lambda module, **_: wrapped.append(module))
    strategy = ddp.DDPStrategy(ProcessGroup(Position(), CPU, (CPU, CPU)), ExchangeConfig(), ComputeConfig())
    model = Stages()
    strategy.shard(model)
    strategy.wrap(model, 4)
    assert {str(p.device) for p in model.first.parameters()} == {"cpu"}
    assert {str(p.device) for p in model.second.parameters()} == {"meta"}
    assert wrapped[0].carrier.device == CPU and wrapped[0].carrier.tolist() == [0.0] * 4  # type: ignore[union-attr,operator]


def test_copies_from_each_gpu_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first one's were: what was read of the others could be torn."""
    monkeypatch.setattr(torch.cuda, "current_stream", str)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    places = [(first, True), (second, True), (CPU, False), (second, True)]
    sources: Any = [SimpleNamespace(device=at, is_cuda=is_cuda) for at, is_cuda in places]
    waited: Any = streams_of(sources)
    assert sorted(waited) == ["cuda:0", "cuda:1"]


def test_dropout_on_each_gpu_depends_on_the_step_alone(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the generator of the first one was seeded: a resumed run drew other numbers on the second."""
    generators = tuple(torch.Generator() for _ in range(3))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)

    def drawn(seed: int) -> list[float]:
        seed_generators(seed)
        return [float(torch.rand((), generator=each)) for each in generators[1:]]

    first = drawn(7)
    assert drawn(8) != first and drawn(7) == first and first[0] != first[1]
