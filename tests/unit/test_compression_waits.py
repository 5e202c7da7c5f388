"""A hook of DDP reads what an all-reduce gives only where that has arrived: behind its own future.

NCCL's future is done as soon as the all-reduce is enqueued; wait() and then() make a stream wait for the
numbers, value() does not, nor does a future that others were collected in. Here the numbers arrive with them.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tandem.config.slices import ExchangeConfig
from tandem.distributed.compression import compression
from tandem.distributed.group import ProcessGroup
from tandem.distributed.position import Position

STALE = -1000.0


class Late(torch.futures.Future[Any]):
    """A future that is done before what it stands for is there."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor, self._arrived = tensor, tensor.clone()
        tensor.fill_(STALE)
        self.set_result([tensor])

    def wait(self) -> Any:
        self._tensor.copy_(self._arrived)
        return super().wait()

    def then(self, callback: Callable[[Any], Any]) -> Any:
        self._tensor.copy_(self._arrived)
        return super().then(callback)


class Work:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._future = Late(tensor)

    def get_future(self) -> Late:
        return self._future


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessGroup]:
    """A group of one rank, whose all-reduces come late."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, **_: Work(tensor))
    yield ProcessGroup(Position(), torch.device("cpu"))
    dist.destroy_process_group()


class Carried(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(17, 17), nn.Linear(17, 3)
        self.carrier = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).square().mean() + (self.carrier * torch.tensor([1.0, 2, 3])).sum()


@pytest.mark.parametrize("bucket_mb", [25, 0.0005])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "powersgd:16"])
def test_a_hook_waits_for_the_future_of_each_of_its_exchanges(
    kind: str, bucket_mb: float, alone: ProcessGroup
) -> None:
    torch.manual_seed(0)
    model = Carried()
    named = {name: p for name, p in model.named_parameters() if name != "carrier"}
    config = ExchangeConfig(gradient_compression=kind)
    hook = compression(config, alone)
    assert hook is not None
    x = torch.ones(5, 17).cumsum(0)
    expected = torch.autograd.grad(model(x), list(named.values()))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    hook.attach(ddp, model.carrier, named)
    for _ in range(2):  # the buckets of the second step are rebuilt
        ddp.zero_grad(set_to_none=True)
        ddp(x).backward()
        assert model.carrier.grad is not None and model.carrier.grad.tolist() == [1.0, 2.0, 3.0]
        for parameter, gradient in zip(named.values(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=0.05, atol=0.05)
