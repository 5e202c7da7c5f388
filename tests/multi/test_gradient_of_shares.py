"""However a global batch is cut, over ranks and into micro-batches, its gradient is that of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategies import Blocks, Classes, in_processes, rows
from torch import Tensor

from tandem.config import Settings
from tandem.data.kinds import training_data
from tandem.data.source import BatchReader
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs
from tandem.training.step import Proposal, TrainStep

pytestmark = pytest.mark.multi

CUTS: dict[int, list[dict[str, Any]]] = {
    1: [{}, {"micro_batch_size": 16}, {"micro_batch_size": 9}],
    2: [
        {},
        {"batch_shares": "3:1"},
        {"batch_shares": "3:1", "micro_batch_size": 16},
        {"batch_shares": "1:6.4", "micro_batch_size": 10},
    ],
}


def step(group: ProcessGroup, name: str, cut: dict[str, Any]) -> tuple[int, float, Any, dict[str, Tensor]]:
    """(samples of this rank, loss, sums, gradients) of the second step of 64 samples."""
    settings, task = Settings().replace(batch_size=64, **cut), TaskWithDefaults(Classes())  # type: ignore[arg-type]
    strategy = strategies.load(name, group)
    torch.manual_seed(1)
    model = strategy.shard(Blocks())
    optimizer = strategy.shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    train_step = TrainStep(
        group, strategy, settings.compute, settings.optimization, 64, 0, task, model, optimizer, Clock()
    )
    reader = BatchReader(settings.data, 5, group.rank, group.size, None, group.device)
    (batches,) = training_data(rows(), reader, None).steps(1, 2)
    train_step.take_dry_step(batches, 1, Costs())
    agreed = train_step.take(batches, 1, Proposal())
    assert agreed is not None
    named = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = {
        name: value.clone() for name, value in strategy.gather_full(named).items() if value is not None
    }
    return sum(len(batch[0]) for batch in batches), agreed.loss, agreed.sums, gradients


def steps(group: ProcessGroup, name: str, _folder: Path) -> list[Any]:
    return [step(group, name, cut) for cut in CUTS[group.size]]


def test_the_gradient_of_any_cut_is_that_of_one_process(tmp_path: Path, free_port: int) -> None:
    alone = in_processes("single", 1, free_port, steps, tmp_path)[0]
    _, loss, sums, gradients = alone[0]
    assert max(float(value.abs().max()) for value in gradients.values()) > 0.01
    found = [("4 of 16", alone[1]), ("8 of 8", alone[2])]
    for name in ("ddp", "fsdp"):
        first, second = in_processes(name, 2, free_port, steps, tmp_path)
        assert [(one[0], other[0]) for one, other in zip(first, second, strict=True)] == [
            (32, 32), (48, 16), (48, 16), (9, 55),
        ]  # fmt: skip
        found += [(f"{name} {cut}", each) for cut, each in zip(CUTS[2], first, strict=True)]
    for what, (_, their_loss, their_sums, theirs) in found:
        assert their_loss == pytest.approx(loss, abs=1e-6), what
        assert their_sums["accuracy"] == pytest.approx(sums["accuracy"]), what
        assert theirs.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(theirs[name], value, rtol=0, atol=1e-6, msg=f"{what} {name}")
