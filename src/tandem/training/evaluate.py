"""Exact evaluation on all ranks: sums and counts, every sample once, no padding."""

from typing import Any

import torch
from torch import nn

from tandem.data.loader import batch_size_of, evaluation_batches
from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import Task


def evaluate(
    world: ProcessGroup, task: Task, model: nn.Module, dataset: Any, batch_size: int, workers: int = 0
) -> dict[str, float]:
    """Means over the whole `dataset`, by score name, equal on all ranks; `loss` is always there.

    Counts are exact and sums are in float64, so the world size does not show beyond rounding. Rank 0's
    buffers go to all ranks first; the unwrapped module runs, since shares may differ by one batch.
    """
    world.broadcast_buffers(model)
    was_training = model.training
    model.eval()
    sums: dict[str, list[float]] = {}
    with torch.no_grad():
        for batch in evaluation_batches(
            dataset,
            world.rank,
            world.size,
            batch_size,
            workers=workers,
            collate=getattr(task, "collate", None),
            device=world.device,
        ):
            for name, (total, count) in _scores(task, model, batch).items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += float(total)
                entry[1] += float(count)
    model.train(was_training)
    names = _all_names(world, sorted(sums))
    reduced = world.sum([value for name in names for value in sums.get(name, [0.0, 0.0])])
    return {
        name: reduced[2 * i] / reduced[2 * i + 1] for i, name in enumerate(names) if reduced[2 * i + 1] > 0
    }


def _scores(task: Task, model: nn.Module, batch: Any) -> dict[str, tuple[Any, Any]]:
    """{name: (sum, count)} of one batch: the task's own `evaluate_batch`, else its loss and metrics."""
    own = getattr(task, "evaluate_batch", None)
    if own is not None:
        return dict(own(model, batch))
    outcome = task.loss(model, batch)
    loss, metrics = outcome if isinstance(outcome, tuple) else (outcome, {})
    count = batch_size_of(batch)
    return {"loss": (float(loss) * count, count), **metrics}


def _all_names(world: ProcessGroup, mine: list[str]) -> list[str]:
    """Score names from rank 0, which always has a share unless the dataset is empty."""
    names = world.broadcast_json(mine)
    return [str(name) for name in names]
