"""Evaluation computes as training does: in its precision, in batches of its size."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from tandem.config import Settings
from tandem.data.datasets import TensorRows
from tandem.tasks.base import TaskWithDefaults
from tandem.training.evaluate import Evaluation, evaluation_batch_size


class Watching:
    def __init__(self) -> None:
        self.autocast: list[torch.dtype | None] = []
        self.sizes: list[int] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.autocast.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        self.sizes.append(len(batch[0]))
        out: Tensor = model(batch[0]).float().square().mean()
        return out


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    "precision, dtype", [("fp32", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_scores_are_computed_in_the_precision_of_the_training(
    precision: str, dtype: torch.dtype | None, own: bool
) -> None:
    group: Any = SimpleNamespace(
        rank=0, size=1, device=torch.device("cpu"), broadcast_buffers=lambda model: None,
        broadcast_json=lambda value: value, gather_json=lambda value: [value], sum=lambda values: values,
    )  # fmt: skip
    task: Any = Watching()
    if own:
        task.evaluate_batch = lambda model, batch: {"loss": (task.loss(model, batch), 1)}
    rows = TensorRows(torch.ones(10, 2), torch.ones(10))
    strategy = cast(Any, SimpleNamespace(shards_parameters=False))
    evaluation = Evaluation(group, strategy, TaskWithDefaults(task), nn.Linear(2, 1), rows, 4, precision)
    assert evaluation.scores()["loss"] > 0
    assert set(task.autocast) == {dtype}
    assert task.sizes == [4, 4, 2]


@pytest.mark.parametrize(
    "settings, ranks, expected",
    [
        ({"batch_size": 240}, 1, 240),
        ({"batch_size": 240}, 7, 35),
        ({"batch_size": 240, "micro_batch_size": 8}, 2, 8),
        ({"batch_size": 24, "micro_batch_size": 100}, 2, 12),
        ({"batch_size": 240, "micro_batch_size": 8, "eval_batch_size": 64}, 2, 64),
    ],
)
def test_a_pass_takes_no_more_than_one_of_the_training(
    settings: dict[str, int], ranks: int, expected: int
) -> None:
    made = Settings().replace(**settings)
    assert (
        evaluation_batch_size(made.evaluation, made.data, cast(Any, SimpleNamespace(size=ranks))) == expected
    )
