"""Build a task's datasets, model, optimizer and scheduler, and validate each one (`mistakes.py`)."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader

from tandem.data.block_order import VALID_SIZES, BlockOrder, checked_sizes
from tandem.data.datasets import Datasets
from tandem.data.fetch import is_stream
from tandem.data.mixture import Mixture
from tandem.data.sampler import BucketedOrder, GlobalOrder, MakeOrder, WeightedOrder
from tandem.data.seeds import seed_datasets
from tandem.errors import ConfigError
from tandem.tasks.base import TaskWithDefaults
from tandem.tasks.mistakes import OUTPUTS, kind, mistake

DATASETS = "return Datasets(train, evaluation), from tandem"
EMPTY = "it has no samples; check its path or filter"
OWN_LOOP = "for anything else write your own loop (docs/your-own-loop.md)"


def datasets_of(task: TaskWithDefaults, seed: int) -> Datasets:
    """Return the datasets for training and evaluation (None: no evaluation). Raises ConfigError."""
    seed_datasets(seed)
    made: Any = task.build_datasets()
    if not (hasattr(made, "train") and hasattr(made, "evaluation")):
        raise mistake(task.build_datasets, kind(made), DATASETS)
    sets = made.evaluation if isinstance(made.evaluation, Mapping) else {"": made.evaluation}
    # A score is called SET/NAME, so a set's name cannot contain the separator.
    if not sets or not all(isinstance(name, str) and "/" not in name and " " not in name for name in sets):
        raise mistake(
            task.build_datasets,
            f"evaluation sets {list(sets)}",
            "return {name: dataset}, with names such as val or test",
        )
    named = {f"evaluation set {name}" if name else "evaluation": each for name, each in sets.items()}
    for part, dataset in (("train", made.train), *named.items()):
        if dataset is None and part == "evaluation":
            continue
        if problem := _problem_of(dataset):
            if problem == EMPTY and part != "train":
                problem += "; to train without an evaluation, return None"
            raise mistake(task.build_datasets, f"{kind(dataset)} as {part}", problem)
    return Datasets(made.train, made.evaluation)


def _problem_of(dataset: Any) -> str:
    """Return a remedy for an invalid dataset; "" for a valid one."""
    if isinstance(dataset, DataLoader):
        return "return the dataset itself: tandem makes the batches and their order (--batch-size, --workers)"
    if hasattr(dataset, "of_rank"):
        return ""
    if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
        return f"a dataset needs __len__ and __getitem__, or __iter__; {DATASETS}"
    if not is_stream(dataset) and not hasattr(dataset, "__len__"):
        return "a dataset with __getitem__ also needs __len__, the number of samples"
    if hasattr(dataset, "__len__") and len(dataset) == 0:
        return EMPTY
    return ""


def order_of(task: TaskWithDefaults, train: Any) -> MakeOrder:
    """Return the order that a task defines by sample weights, lengths or blocks. Raises ConfigError."""
    own = [name for name in ("sample_weights", "sample_lengths", "sample_blocks") if name in task.own]
    if not own:
        return GlobalOrder
    name = own[0]
    method = getattr(task, own[0])
    if len(own) > 1:
        raise mistake(method, f"an order, and so does {own[1]}", "remove one of them", "sets")
    if hasattr(train, "of_rank") or is_stream(train):
        got = f"the order of {kind(train)}, which has its own"
        raise mistake(method, got, "use it only with a dataset that has __len__ and __getitem__", "sets")
    made: Any = method(train)
    if isinstance(train, Mixture):
        raise mistake(method, "the order of a mixture, which has its own", "remove the method", "sets")
    if name == "sample_blocks":
        return _order_by_blocks(method, made, len(train))
    if hasattr(train, "block_sizes"):
        raise mistake(method, f"an order, and so does block_sizes of {kind(train)}", "remove one", "sets")
    try:
        numbers = torch.as_tensor(made, dtype=torch.float64).cpu()
    except (TypeError, ValueError, RuntimeError):
        raise mistake(method, kind(made), f"return a number for each of the {len(train):,} samples") from None
    if numbers.shape != (len(train),):
        got = f"a tensor of shape {tuple(numbers.shape)}"
        raise mistake(method, got, f"return a number for each of the {len(train):,} samples")
    if not numbers.isfinite().all() or (numbers < 0).any() or not numbers.any():
        raise mistake(
            method,
            f"numbers from {numbers.min():g} to {numbers.max():g}",
            "return numbers >= 0 that are not all 0",
        )
    if name == "sample_weights":
        return partial(WeightedOrder, weights=numbers)
    return partial(BucketedOrder, lengths=numbers)


def _order_by_blocks(method: Callable[..., Any], sizes: Any, samples: int) -> MakeOrder:
    try:
        return partial(BlockOrder, sizes=checked_sizes(sizes, samples))
    except ValueError as error:
        raise mistake(method, str(error), VALID_SIZES) from None


def model_of(task: TaskWithDefaults, devices: Sequence[torch.device]) -> nn.Module:
    """Return the model on the devices.

    Raises ConfigError if the task's `place` takes another number of them.
    """
    try:
        # Check this before the model is built, which may take minutes.
        inspect.signature(task.place).bind(None, *devices)
    except TypeError:
        raise ConfigError(
            f"--devices-per-rank {len(devices)} needs a task with a method place(model, DEVICE, ...) that "
            f"puts the model's parts on {len(devices)} devices"
        ) from None
    built: Any = task.build_model()
    if not isinstance(built, nn.Module):
        raise mistake(task.build_model, kind(built), "return the model, an nn.Module")
    placed = task.place(built, *devices)
    model = placed if isinstance(placed, nn.Module) else built
    if not any(parameter.requires_grad for parameter in model.parameters()):
        advice = "return one in which some parameters have requires_grad"
        raise mistake(task.build_model, "a model without trainable parameters", advice)
    return model


def optimizer_of(task: TaskWithDefaults, model: nn.Module) -> torch.optim.Optimizer | None:
    """Return the task's own optimizer, if it has one. Raises ConfigError unless it is one for this model."""
    own: Any = task.build_optimizer(model)
    if own is None:
        return None
    if not isinstance(own, torch.optim.Optimizer):
        advice = (
            f"return one torch.optim.Optimizer; for two learning rates use two parameter groups, {OWN_LOOP}"
        )
        raise mistake(task.build_optimizer, kind(own), advice)
    of_model = {id(parameter) for parameter in model.parameters()}
    # An optimizer may leave out parameters, or also train those of a loss.
    if not any(id(each) in of_model for group in own.param_groups for each in group["params"]):
        advice = "build it from the model passed to build_optimizer"
        got = "an optimizer without any of the model's parameters"
        raise mistake(task.build_optimizer, got, advice)
    return own


def scheduler_of(
    task: TaskWithDefaults, optimizer: torch.optim.Optimizer, total_steps: int
) -> LRScheduler | None:
    """Return the task's own scheduler for a run of `total_steps` optimizer steps, if it has one."""
    own: Any = _built_scheduler(task, optimizer, total_steps)
    if own is None:
        return None
    if isinstance(own, ReduceLROnPlateau):
        advice = f"a schedule depends on steps only, not on evaluation scores; {OWN_LOOP}"
        raise mistake(task.build_scheduler, kind(own), advice)
    if not all(callable(getattr(own, name, None)) for name in ("step", "state_dict", "load_state_dict")):
        raise mistake(task.build_scheduler, kind(own), "return a torch.optim.lr_scheduler.LRScheduler")
    if getattr(own, "optimizer", optimizer) is not optimizer:
        advice = "build it from the optimizer passed to build_scheduler"
        raise mistake(task.build_scheduler, f"{kind(own)} for a different optimizer", advice)
    # OneCycleLR raises an error after its last step.
    if isinstance(own, OneCycleLR) and own.total_steps < total_steps:
        got = f"{kind(own)} of {own.total_steps:,} steps for a run of {total_steps:,}"
        raise mistake(task.build_scheduler, got, "use the argument total_steps")
    found: LRScheduler = own
    return found


def check_methods(task: TaskWithDefaults) -> None:
    """Raise ConfigError for a method without its counterpart, or with a wrong signature."""
    if "evaluate_all" in task.own and "evaluate_batch" not in task.own:
        raise mistake(task.evaluate_all, "outputs, but the task has no evaluate_batch", OUTPUTS, "needs")
    for name, other in (("state_dict", "load_state_dict"), ("load_state_dict", "state_dict")):
        if name in task.own and other not in task.own:
            method = getattr(task, name)
            raise mistake(method, f"a matching {other}", f"add {other} to the task", "needs")
    try:
        # A call would show this only after the first evaluation.
        inspect.signature(task.after_evaluation).bind({})
    except TypeError as error:
        advice = "write it as after_evaluation(self, scores)"
        raise mistake(task.after_evaluation, f"the scores ({error})", advice, "cannot take") from None


def answer_of(task: TaskWithDefaults, scores: Mapping[str, float]) -> bool:
    """Return True if the task ends its run after these scores.

    Raises ConfigError unless it returns a bool.
    """
    answer: Any = task.after_evaluation(dict(scores))
    # A comparison of NumPy numbers returns numpy.bool_, which is not a bool.
    if answer is not None and not isinstance(answer, bool | numpy.bool_):
        advice = "return True to end the run here, or False to continue"
        raise mistake(task.after_evaluation, kind(answer), advice)
    return bool(answer)


def _built_scheduler(task: TaskWithDefaults, optimizer: torch.optim.Optimizer, total_steps: int) -> Any:
    """Call build_scheduler, with `total_steps` if its signature accepts it."""
    parameters = list(inspect.signature(task.build_scheduler).parameters.values())
    if any(each.name == "total_steps" and each.kind is each.KEYWORD_ONLY for each in parameters):
        return task.build_scheduler(optimizer, total_steps=total_steps)  # type: ignore[call-arg]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    second = [each for each in parameters if each.kind in positional][1:2]
    # A second parameter with another name and a default belongs to the task.
    if second and (second[0].name == "total_steps" or second[0].default is inspect.Parameter.empty):
        return task.build_scheduler(optimizer, total_steps)
    return task.build_scheduler(optimizer)
