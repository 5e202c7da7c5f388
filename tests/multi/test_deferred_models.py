"""fsdp builds a model without its values: rank 0 computes them one by one, and each rank keeps its rows."""

import io
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forked_ranks import in_ranks
from needs import require_strategy
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup

pytestmark = [pytest.mark.multi, pytest.mark.timeout(180)]


class Small(nn.Module):
    """Uneven shares, fewer rows than ranks, tied weights, a second pass over all, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 5, padding_idx=2)
        self.blocks = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 7)
        self.out.weight = self.words.weight
        self.one = nn.Parameter(torch.tensor([1.5]))
        self.register_buffer("angles", torch.arange(4.0).sin(), persistent=False)
        self.also_angles = self.angles
        self.apply(self._again)

    def _again(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x) * self.one + self.angles.sum() + self.also_angles.sum()
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.out(self.norm(x))
        return out


class Seeded(Small):
    def __init__(self) -> None:
        torch.manual_seed(4)
        super().__init__()


def built(group: ProcessGroup, kind: type[Small]) -> dict[str, Any]:
    """One rank's view of a model under fsdp, and after one step."""
    said = io.StringIO()
    log = logging.getLogger("tandem.run")
    log.addHandler(logging.StreamHandler(said))
    log.setLevel(logging.INFO)
    strategy: Any = strategies.load("fsdp", group)
    torch.manual_seed(100 + group.rank)  # rank 0's values count
    model = strategy.build(kind)
    has_values = not any(parameter.is_meta for parameter in model.parameters())
    model = strategy.shard(model)
    whole = strategy.gather_full(model.state_dict())
    found = {
        "has_values": has_values,
        "tied": model.out.weight is model.words.weight,
        "local": {name: strategy.local(p).shape for name, p in model.named_parameters()},
        "whole": {name: value.clone() for name, value in whole.items() if value is not None},
        "angles": model.angles,
        "shared": model.angles is model.also_angles,
        "drawn": torch.rand(3),
        "said": said.getvalue(),
    }
    torch.manual_seed(100 + group.rank)
    other = strategies.load("fsdp", group).shard(kind())
    found["trained"] = [trained(strategy, each) for each in (model, other)]
    return found


def trained(strategy: Any, model: nn.Module) -> dict[str, Tensor]:
    """The whole state after a step, on rank 0."""
    model(torch.arange(6)).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    whole = strategy.gather_full(model.state_dict())
    return {name: value for name, value in whole.items() if value is not None}


@pytest.mark.parametrize("kind", [Small, Seeded])
def test_fsdp_starts_from_rank_0s_values_and_no_rank_has_the_whole_model(
    kind: type[Small], tmp_path: Path, free_port: int
) -> None:
    require_strategy("fsdp")
    strategies.preload("fsdp")
    ranks = in_ranks(lambda group: built(group, kind), 3, free_port, tmp_path)
    torch.manual_seed(100)
    expected = kind()
    drawn = torch.rand(3)
    for each in ranks:
        assert each["has_values"] is (kind is Seeded) and each["tied"]
        assert torch.equal(each["drawn"], drawn)
        assert torch.equal(each["angles"], expected.angles) and each["shared"]
        assert each["local"]["words.weight"][0] <= 3
    for name, value in expected.state_dict().items():
        assert torch.equal(ranks[0]["whole"][name], value), name
    line = "each rank builds the whole model, because it seeds a random generator"
    assert (line in ranks[0]["said"]) is (kind is Seeded) and not ranks[1]["said"]
    deferred, whole = ranks[0]["trained"]
    assert all(torch.equal(deferred[name], value) for name, value in whole.items()) and len(whole) == 13
