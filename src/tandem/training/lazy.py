"""Initialize lazy modules (nn.LazyLinear), whose parameters get their shapes from the first batch."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tandem.data.kinds import can_be_read_again, evaluation_batches
from tandem.distributed.group import ProcessGroup
from tandem.tasks.base import WholeTask
from tandem.tasks.mistakes import check_batch, mistake

SAMPLES = 2
"""Samples of the training set. BatchNorm needs two."""


def is_lazy(value: Any) -> bool:
    """Return whether a parameter or buffer has no shape yet."""
    return isinstance(value, nn.UninitializedParameter | nn.UninitializedBuffer)


def materialize(task: WholeTask, model: nn.Module, train: Any, world: ProcessGroup) -> None:
    """Give each lazy parameter its shape and initial values, by a forward pass of a few samples.

    The pass is in evaluation mode, so neither dropout nor running statistics depend on it, and the weights
    are the same with any number of ranks. Raises ConfigError if no batch can be read in advance, or if none
    reaches a module.
    """
    if not _without_shape(model):
        return
    if not can_be_read_again(train, world.rank, world.size):
        got = "a lazy module, but the data can be read only once"
        raise mistake(task.build_model, got, "set the module's sizes explicitly, as in nn.Linear(in, out)")
    part = (world.rank, world.size) if hasattr(train, "of_rank") else (0, 1)
    batches = evaluation_batches(train, *part, SAMPLES, collate=task.collate, device=world.device)
    batch = next(batches, None)
    if batch is not None:
        check_batch(task.collate, task.build_datasets, batch)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            task.loss(model, batch)
        model.train(was_training)
    if names := _without_shape(model):
        got = f"a lazy module that the first batch does not reach ({names[0]})"
        raise mistake(task.build_model, got, "set the module's sizes explicitly, as in nn.Linear(in, out)")


def _without_shape(model: nn.Module) -> list[str]:
    named: Iterator[tuple[str, Any]] = iter([*model.named_parameters(), *model.named_buffers()])
    return [name for name, value in named if is_lazy(value)]
