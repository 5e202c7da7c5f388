"""A loss that is a mean over tokens: the gradients are those of the global batch, however it is cut."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_strategies import in_processes
from torch import Tensor, nn
from torch.nn import functional

from tandem.config import Settings
from tandem.data.datasets import TensorRows
from tandem.data.kinds import training_data
from tandem.data.source import BatchReader
from tandem.distributed import strategy as strategies
from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import TaskWithDefaults
from tandem.telemetry.clock import Clock
from tandem.telemetry.meter import Costs
from tandem.training.step import Proposal, TrainStep

pytestmark = pytest.mark.multi

BATCH, LENGTH, WORDS, RATE = 12, 9, 7, 0.5


def sequences() -> TensorRows:
    """Token numbers, of which 1 to LENGTH count; the rest are -100."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (BATCH, 1), generator=generator)
    return TensorRows(words, words.masked_fill(torch.arange(LENGTH) >= lengths, -100))


def model_of_words() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))


class Words:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    def weight(self, batch: Any) -> Tensor:
        return (batch[1] != -100).sum()


def one_step(group: ProcessGroup, name: str, folder: Path) -> list[Any]:
    """(loss, weights) after a step of plain SGD, for several sizes of micro-batches."""
    found = []
    for micro in (None, 1, 3):
        settings = Settings().replace(batch_size=BATCH, micro_batch_size=micro)
        reader = BatchReader(settings.data, 0, group.rank, group.size, None, group.device, group.gather)
        strategy = strategies.load(name, group)
        model = strategy.shard(model_of_words())
        task: Any = TaskWithDefaults(Words())  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        made = settings.compute, settings.optimization, BATCH, 0, task, model, optimizer
        train_step = TrainStep(group, strategy, *made, Clock())
        (batches,) = training_data(sequences(), reader, None).steps(0, 1)
        train_step.take_dry_step(batches, 0, Costs())
        agreed = train_step.take(batches, 0, Proposal())
        assert agreed is not None
        found.append((agreed.loss, model.state_dict()))
    return found


def by_hand(_group: ProcessGroup, _name: str, _folder: Path) -> tuple[float, dict[str, Tensor]]:
    """The same of plain PyTorch. In a process of its own: a backward pass here may keep those that are forked
    later from theirs."""
    model, rows = model_of_words(), sequences()
    loss = functional.cross_entropy(model(rows.inputs).flatten(0, 1), rows.targets.flatten())
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.item(), {name: (p - RATE * p.grad).detach() for name, p in model.named_parameters()}  # type: ignore[operator]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradients_are_the_mean_over_the_tokens_of_the_global_batch(
    ranks: int, tmp_path: Path, free_port: int
) -> None:
    ((loss, wanted),) = in_processes("single", 1, free_port, by_hand, tmp_path)
    for rank in in_processes("ddp" if ranks > 1 else "single", ranks, free_port, one_step, tmp_path):
        for agreed, weights in rank:
            assert agreed == pytest.approx(loss, rel=1e-6)
            assert all((weights[name] - tensor).abs().max() <= 1e-6 for name, tensor in wanted.items())


def test_the_evaluation_counts_tokens_as_well() -> None:
    task: Any = TaskWithDefaults(Words())  # type: ignore[arg-type]
    rows, model = sequences(), model_of_words()
    total, count = task.evaluate_batch(model, (rows.inputs, rows.targets))["loss"]
    assert count == int((rows.targets != -100).sum())
    assert total == pytest.approx(float(task.loss(model, (rows.inputs, rows.targets))) * count)
