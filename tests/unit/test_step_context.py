"""`step` and `epoch` of a task's loss and collate: who asks is told those of the batch."""

import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tandem.config.slices import DataConfig
from tandem.data.fetch import StepContext, WithStepContext, with_step_context
from tandem.data.kinds import evaluation_batches, training_data
from tandem.data.source import BatchReader
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.mistakes import line_of

CPU = torch.device("cpu")
EPOCH_STEPS, STEPS = 3, 7


class Bare:
    def build_model(self) -> None: ...
    def build_datasets(self) -> None: ...
    def loss(self, model: Any, batch: Any) -> Any: ...


class Tells(Bare):
    def loss(self, model: Any, batch: Any, epoch: int, step: int) -> Any:
        return model, batch, step, epoch

    def collate(self, samples: list[Any], *, step: int) -> Any:
        return torch.stack(samples), step


class TellsEpoch(Bare):
    def collate(self, samples: list[Any], epoch: int = -1) -> Any:
        return torch.stack(samples), epoch


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(SAMPLES)

    def __len__(self) -> int:
        return len(SAMPLES)


class Parts:
    def of_rank(self, rank: int, world_size: int) -> Any:
        return SAMPLES


SAMPLES = [torch.tensor([float(number)]) for number in range(4 * EPOCH_STEPS)]
SETS = {"map": SAMPLES, "stream": Stream(), "parts": Parts()}


def test_who_does_not_ask_is_called_as_it_is() -> None:
    for task in (
        Bare(),
        type("Collator", (Bare,), {"collate": lambda self, samples, step_size=1: samples})(),
    ):
        whole = TaskWithDefaults(task)
        assert not isinstance(whole.loss, WithStepContext) and not isinstance(whole.collate, WithStepContext)
    for method in (lambda step: step, lambda epoch, step: step, lambda *step, **epoch: step, dict.get, None):
        assert with_step_context(method, 2, StepContext()) is method, "what is always given may have any name"


def test_a_loss_is_told_of_the_step_that_is_taken() -> None:
    task = TaskWithDefaults(Tells())
    assert task.loss("model", "batch") == ("model", "batch", 0, 0)
    task.moment.resume(7, 3)
    assert task.loss("model", "batch") == ("model", "batch", 6, 2)
    task.moment.step = 9
    assert task.loss("model", "batch") == ("model", "batch", 9, 3)
    task.moment.resume(0, 3)
    assert task.loss("model", "batch") == ("model", "batch", 0, 0)


def test_mistakes_are_said_of_the_method_itself() -> None:
    task = TaskWithDefaults(Tells())
    assert line_of(task.loss) == line_of(Tells.loss) and task.loss.__name__ == "loss"
    collate = pickle.loads(pickle.dumps(TaskWithDefaults(TellsEpoch()).collate))
    assert collate.at(4, 2, SAMPLES[:2])[1] == 2
    wraps = TaskWithDefaults(type("Object", (Bare,), {"collate": partial(TellsEpoch().collate, epoch=5)})())
    assert wraps.collate is not None and wraps.collate(SAMPLES[:2])[1] == 0


@pytest.mark.parametrize("start", [0, 2, 3])
@pytest.mark.parametrize("kind, workers", [("map", 0), ("map", 1), ("stream", 0), ("parts", 0)])
@pytest.mark.parametrize("task", [Tells(), TellsEpoch()], ids=["step", "epoch"])
def test_a_batch_is_told_of_its_own_step(task: Any, kind: str, workers: int, start: int) -> None:
    config = DataConfig(batch_size=4, micro_batch_size=2, workers=workers)
    reader = BatchReader(config, 0, 0, 1, TaskWithDefaults(task).collate, CPU, lambda size: [size])
    given = training_data(SETS[kind], reader, None).steps(start, STEPS)
    for step, micro_batches in zip(range(start, STEPS), given, strict=True):
        wanted = step if isinstance(task, Tells) else step // EPOCH_STEPS
        assert [told for _, told in micro_batches] == [wanted, wanted]


@pytest.mark.parametrize("kind, workers", [("map", 0), ("map", 1), ("stream", 0), ("parts", 0)])
def test_an_evaluation_is_told_of_the_last_step(kind: str, workers: int) -> None:
    whole = TaskWithDefaults(Tells())
    for finished, told in ((0, 0), (5, 4)):
        whole.moment.resume(finished, EPOCH_STEPS)
        batches = evaluation_batches(SETS[kind], 0, 1, 5, workers=workers, collate=whole.collate, device=CPU)
        assert [step for _, step in batches] == [told] * 3
