"""The interface of a task, and how a task is found by its name.

A task is a plain class. The three methods of `Task` are enough; tandem has the sampler, loader, loop,
precision, DDP, checkpoints and metrics. `TaskWithDefaults` lists all optional methods. The fields of a
dataclass are its settings, given with `--task.FIELD VALUE`; a field named `data_dir` or `download` gets the
value of `--data-dir` or `--download`.

For datasets that return many samples at once, and for augmentation, see `tandem/data/datasets.py`.
"""

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Protocol, Union, cast, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tandem.config.task_names import VALID, parsed
from tandem.data.datasets import Datasets, install_vision
from tandem.data.fetch import Collate, StepContext, with_step_context
from tandem.data.loader import batch_size_of
from tandem.errors import ConfigError, TandemError
from tandem.tasks.mistakes import Outputs, loss_and_sums, weight_of, where
from tandem.tasks.mistakes import Sums as Sums
from tandem.text import did_you_mean, nearest, one_line

# A task's own settings: convert the text of `--task.FIELD VALUE` to the type of the dataclass field.

_TRUTH = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
_FROM_TEXT: Mapping[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("an integer", int),
    float: ("a number", float),
    # bool(text) would be true for any text, even `false`.
    bool: ("true or false", lambda text: _TRUTH[text.lower()]),
    str: ("text", str),
    Any: ("text", str),
    Path: ("a path", Path),
    # `_convert` accepts None earlier, so all other text is rejected here, by a KeyError.
    NoneType: ("none", dict[str, None]().__getitem__),
}
_SETTABLE = "int, float, bool, str, Path, Literal and X | None"


def convert_fields(
    task_class: type[Any], name: str, texts: Mapping[str, str], given: Mapping[str, object]
) -> dict[str, Any]:
    """Return the keyword arguments of `task_class`: converted texts, and values of `given` with a field.

    Raises ConfigError for an unknown field, an invalid value, and a required field without a value.
    """
    declared = dataclasses.fields(task_class) if dataclasses.is_dataclass(task_class) else ()
    known = {field.name: field for field in declared if field.init}
    values: dict[str, Any] = {field: value for field, value in given.items() if field in known}
    # Annotations are evaluated only if a value needs them, because that runs the task's code and may fail.
    hints = _hints(task_class, name) if texts else {}
    for key, text in texts.items():
        field = key.replace("-", "_")
        if field in given:
            raise ConfigError(f"--task.{key} cannot be set; use --{field.replace('_', '-')} instead")
        if field not in known:
            free = [other for other in known if other not in given]
            raise ConfigError(f"task {name} has no field {key!r}{_hint(field, free)}")
        try:
            values[field] = _convert(hints[field], text)
        except ValueError as error:
            raise ConfigError(f"--task.{key}: invalid value {text!r}; {error}") from error
    if absent := [field for field in known if field not in values and _is_required(known[field])]:
        flags = " ".join(f"--task.{field} VALUE" for field in absent)
        raise ConfigError(f"task {name} needs {flags}")
    return values


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def _hints(task_class: type[Any], name: str) -> dict[str, Any]:
    try:
        # After `from __future__ import annotations`, a field's own type is only text.
        return get_type_hints(task_class)
    except Exception as error:  # the annotations are the user's code
        raise ConfigError(f"cannot read the field types of task {name} ({one_line(error)})") from error


def _convert(kind: Any, text: str) -> Any:
    """Convert `text` to `kind`, or to the first type of a union that accepts it. Raises ValueError.

    The error's text says which values are valid.
    """
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if NoneType in kinds and text.lower() in ("", "none"):
        return None
    valid = []
    for choice in kinds:
        if get_origin(choice) is Literal:
            words = f"one of {', '.join(map(str, get_args(choice)))}"
            convert: Callable[[str], Any] = {str(value): value for value in get_args(choice)}.__getitem__
        elif choice in _FROM_TEXT:
            words, convert = _FROM_TEXT[choice]
        else:
            name = getattr(choice, "__name__", choice)
            raise ValueError(f"a field of type {name} cannot be set from the command line; use {_SETTABLE}")
        try:
            return convert(text)
        except (ValueError, KeyError):
            valid.append(words)
    raise ValueError(f"expected {', or '.join(valid)}")


def _hint(field: str, known: list[str]) -> str:
    if not known:
        return "; it has no fields"
    near = nearest(field, known)
    return f"{did_you_mean(near and f'--task.{near}', ';')} its fields are {', '.join(known)}"


NEAR = 0.9
"""Similarity to an optional method at which a name counts as a typo, such as "build_schedule"."""
NAMES_ELSEWHERE = {
    "collate_fn": "collate",
    "configure_optimizers": "build_optimizer",
    "build_lr_scheduler": "build_scheduler",
    "eval_batch": "evaluate_batch",
}
"""Names of the same methods in other libraries."""
REQUIRED_METHODS = ("build_model", "build_datasets", "loss")


class Task(Protocol):
    """The three methods that every task has."""

    def build_model(self) -> nn.Module: ...

    def build_datasets(self) -> Datasets: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Sums]:
        """Return the mean loss over the batch, a scalar on the model's device, and optionally sums."""
        ...


class TaskWithDefaults:
    """A task with all methods: its own, and the defaults of this class for those that it does not define.

    `own`: names of the methods that the task defines. `moment`: the `step` and `epoch` for a `loss` or a
    `collate` that takes them; the training loop updates it.
    """

    def __init__(self, task: Task) -> None:
        self.own = frozenset(
            name for name in vars(TaskWithDefaults) if name[0] != "_" and hasattr(task, name)
        )
        for name in self.own.union(REQUIRED_METHODS):
            setattr(self, name, getattr(task, name, None))
        self.moment = StepContext()
        self.loss = with_step_context(self.loss, 2, self.moment)
        self.collate = with_step_context(self.collate, 1, self.moment)

    build_model: Callable[[], nn.Module]
    build_datasets: Callable[[], Datasets]
    loss: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Sums]]

    collate: Collate | None = None
    """(samples) -> batch; replaces torch's default_collate."""

    def prepare(self) -> None:
        """Download data or prepare it; called once per node, before `build_datasets`."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module | None:
        """Return the model on the device, or None if it was moved in place.

        With --devices-per-rank 2, the signature is place(model, first, second), for a model in two parts.
        """
        return model.to(device)

    def build_optimizer(self, _model: nn.Module) -> torch.optim.Optimizer | None:
        """Return an optimizer, which replaces --optimizer; its learning rates are not scaled."""
        return None

    def build_scheduler(self, _optimizer: torch.optim.Optimizer, *_total_steps: int) -> LRScheduler | None:
        """Return a scheduler, which replaces --schedule; stepped once per step. `total_steps` is optional."""
        return None

    def freeze(self, _model: nn.Module, _epoch: int) -> None:
        """Set `requires_grad` of all parameters for this 0-based epoch; depend on the epoch only.

        Called before the first step of a start and of each epoch. Ranks exchange only the gradients of
        parameters that require them.
        """

    def after_resume(self, model: nn.Module) -> None:
        """Called after a checkpoint was loaded."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """Called on every rank after each optimizer step, before an evaluation or a save that is due.

        `step` counts finished steps, from 1. It is also called after a step whose update was skipped; the
        weights are then unchanged.
        """

    def after_evaluation(self, _scores: Mapping[str, float]) -> bool:
        """Called on every rank after each evaluation, with the same scores. Return True to end the run.

        The run is then saved at this step and counts as complete. Rank 0's return value decides.
        """
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the task's own state (a best score, averaged weights), which every checkpoint saves.

        It must be equal on all ranks: tensors, numbers, text, lists and dicts.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; called before `after_resume`."""

    def sample_weights(self, _train: Any) -> Any:
        """Return the relative frequency [n] with which each training sample is drawn; none below 0."""
        return None

    def sample_lengths(self, _train: Any) -> Any:
        """Return the length [n] of each training sample, to form global batches of similar lengths."""
        return None

    def sample_blocks(self, _train: Any) -> Any:
        """Return the number of samples of each stored block, in order, to read few blocks at a time."""
        return None

    def weight(self, batch: Any) -> Tensor | float:
        """Return what `loss` averages over, such as the number of tokens; depend on the batch only.

        The gradient of a step is that of the mean over the whole global batch, with these weights.
        """
        return batch_size_of(batch)

    def evaluate_all(self, _outputs: dict[str, Any]) -> Mapping[str, float]:
        """Compute scores from the outputs of all samples, on the CPU, in the order of the evaluation set.

        Called on rank 0; all ranks get its scores. `evaluate_batch` must then return (sums, outputs).
        """
        return {}

    def evaluate_batch(self, model: nn.Module, batch: Any) -> Sums | tuple[Sums, Outputs]:
        """Return sums for the scores of an evaluation; by default, those that `loss` returns."""
        loss, sums = loss_and_sums(self.loss, self.loss(model, batch))
        count = float(weight_of(self.weight, self.weight(batch)))
        return {"loss": (float(loss) * count, count), **sums}


def load_task(name: str, fields: Mapping[str, str], data_dir: Path, download: bool) -> Task:
    """The task `name` (built in, `path/to/file.py:Class` or `package.module:Class`) with its fields set.

    A file or module with a single task class may be named without the class.
    Raises ConfigError on an unknown name, a module that does not import, and fields that do not fit.
    """
    found = task_class(name)
    given = {"data_dir": data_dir, "download": download}
    values = convert_fields(found, name, fields, given)
    try:
        task = found(**values)
        # A task that is not a dataclass gets them as attributes.
        for attribute in given.keys() - values.keys():
            if hasattr(task, attribute):
                setattr(task, attribute, given[attribute])
    # A task's own ConfigError is already one clear line.
    except TandemError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot create task {name} with these fields ({where(error)})") from error
    return cast(Task, task)


def task_class(name: str) -> type[Any]:
    """Import and return the class that `name` refers to. Raises ConfigError like `load_task`."""
    name, location, class_name = asked = parsed(name)
    module = _module_of_file(Path(location)) if asked.is_file else _module_of_name(location, name)
    if not class_name:
        return _check_similar_names(_only_task(module, name))
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [candidate.__name__ for candidate in _task_classes(module)]
        raise ConfigError(f"{location} has no class {class_name!r}; task classes in it: {_listed(classes)}")
    if absent := _missing_methods(found):
        raise ConfigError(
            f"{name} is not a task: add {_listed(absent)} (a task has {_listed(REQUIRED_METHODS)})"
        )
    return _check_similar_names(found)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file under a unique name; its directory is appended to sys.path for its neighbors."""
    path = path.resolve()
    # The prefix keeps a task file with the name of a package from replacing it in sys.modules.
    name = f"tandem_task_{path.stem}"
    loaded = sys.modules.get(name)
    # A second import would create other classes, and pickle accepts only the same ones.
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    _search_also(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        # Python also removes a module that failed: a later import must not find half of it.
        del sys.modules[name]
        raise ConfigError(f"task file {path} {_not_imported(error)}") from error
    return module


def _module_of_name(location: str, name: str) -> ModuleType:
    # Python adds the current directory for `python -m`, but not for the command `tandem`.
    _search_also(Path.cwd())
    try:
        return importlib.import_module(location)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # Only a missing task means a wrong name. If the task exists and its own import fails, the error is
        # another one.
        if missing is not None and f"{location}.".startswith(f"{missing}."):
            raise ConfigError(f"task {name!r}: no module named {missing!r}; {VALID}") from error
        raise ConfigError(f"task module {location} {_not_imported(error)}") from error


def _not_imported(error: Exception) -> str:
    how = install_vision(error)
    return f"cannot be imported ({where(error)})" + (f"; {how}" if how else "")


def _search_also(folder: Path) -> None:
    if str(folder) not in sys.path:
        # The folder comes last: a neighbor of the task must not hide an installed package.
        sys.path.append(str(folder))


def _only_task(module: ModuleType, name: str) -> type[Any]:
    classes = _task_classes(module)
    is_file = name.endswith(".py")
    if not classes:
        raise ConfigError(
            f"{name} has 0 task classes: a task is a class with {_listed(REQUIRED_METHODS)}; start a script "
            f"without --task: tandem launch {'' if is_file else '-m '}{name}"
        )
    if len(classes) != 1:
        names = _listed([found.__name__ for found in classes])
        raise ConfigError(
            f"{name} has {len(classes)} task classes ({names}): choose one, as in {name}:MyTask"
        )
    return classes[0]


def _task_classes(module: ModuleType) -> list[type[Any]]:
    classes = (found for _, found in inspect.getmembers(module, inspect.isclass))
    # A task class that the file imports, such as a base class, does not count.
    return [found for found in classes if found.__module__ == module.__name__ and not _missing_methods(found)]


def _missing_methods(found: type[Any]) -> list[str]:
    return [method for method in REQUIRED_METHODS if not callable(getattr(found, method, None))]


def _check_similar_names(found: type[Any]) -> type[Any]:
    """Return `found`. Raises ConfigError for a method with nearly the name of an optional one.

    Such a method would never be called.
    """
    optional = [name for name in vars(TaskWithDefaults) if name[0] != "_" and not hasattr(found, name)]
    for name, _ in inspect.getmembers(found, inspect.isroutine):
        if name[0] == "_" or hasattr(TaskWithDefaults, name) or name in REQUIRED_METHODS:
            continue
        near = NAMES_ELSEWHERE.get(name) or nearest(name, optional, NEAR)
        if near in optional:
            raise ConfigError(
                f"{found.__name__}.{name} would never be called{did_you_mean(near)} "
                f"If it is a helper, rename it to _{name}"
            )
    return found


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
