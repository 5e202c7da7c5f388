"""What a task is, and how one is found by its name.

A task is a plain class; the three methods of `Task` are enough, and tandem owns the sampler, loader, loop,
precision, DDP, checkpoints and metrics. What it may have besides is said once, by `WholeTask`. A dataclass's
fields are its settings, given with `--task.FIELD VALUE`; a field named `data_dir` or `download` is filled
from `--data-dir` and `--download`.

How a dataset answers for many indices at once, and how it augments, is said in `tandem/data/datasets.py`.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from tandem.data.asked import Moment, asking
from tandem.data.datasets import Datasets
from tandem.data.fetch import Collate
from tandem.data.loader import batch_size_of
from tandem.errors import ConfigError, TandemError
from tandem.tasks.fields import convert_fields
from tandem.tasks.mistakes import Outputs, loss_and_sums, weight_of, where
from tandem.tasks.mistakes import Sums as Sums
from tandem.tasks.names import VALID, parsed

NEAR = 0.9
"""How alike a method's name and an optional one are when it is a slip, as "build_schedule" is."""
MEANT = {
    "collate_fn": "collate",
    "configure_optimizers": "build_optimizer",
    "build_lr_scheduler": "build_scheduler",
    "eval_batch": "evaluate_batch",
}
"""What the same thing is called elsewhere."""
REQUIRED_METHODS = ("build_model", "build_datasets", "loss")


class Task(Protocol):
    """What every task has."""

    def build_model(self) -> nn.Module: ...

    def build_datasets(self) -> Datasets: ...

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Sums]:
        """The mean loss over the batch, a scalar on the model's device, and sums for further numbers."""
        ...


class WholeTask:
    """A task with all methods there are: its own, and those that stand here where it has none.

    `own`: the names of the methods here that are the task's own. `moment`: what a `loss` and a `collate` are
    told that ask for `step` or `epoch`; whoever takes the steps keeps it.
    """

    def __init__(self, task: Task) -> None:
        self.own = frozenset(name for name in vars(WholeTask) if name[0] != "_" and hasattr(task, name))
        for name in self.own.union(REQUIRED_METHODS):
            setattr(self, name, getattr(task, name, None))
        self.moment = Moment()
        self.loss = asking(self.loss, 2, self.moment)
        self.collate = asking(self.collate, 1, self.moment)

    build_model: Callable[[], nn.Module]
    build_datasets: Callable[[], Datasets]
    loss: Callable[[nn.Module, Any], Tensor | tuple[Tensor, Sums]]

    collate: Collate | None = None
    """(samples) -> batch, instead of torch's default_collate."""

    def prepare(self) -> None:
        """Once on each node, before `build_datasets`: downloads."""

    def place(self, model: nn.Module, device: torch.device) -> nn.Module | None:
        """The model on the device; None where it has been moved in place.

        With --devices-per-rank 2 a task's own place(model, first, second) has the parts on several.
        """
        return model.to(device)

    def build_optimizer(self, _model: nn.Module) -> torch.optim.Optimizer | None:
        """Instead of --optimizer; its learning rates are left as they are."""
        return None

    def build_scheduler(self, _optimizer: torch.optim.Optimizer, *_total_steps: int) -> LRScheduler | None:
        """Instead of --schedule; stepped once per optimizer step. A task's may take `total_steps` or not."""
        return None

    def freeze(self, _model: nn.Module, _epoch: int) -> None:
        """Set `requires_grad` of all parameters as it shall be in this 0-based epoch, and of the epoch alone.

        Before the first step of a start and of each epoch; what is exchanged changes with it.
        """

    def after_resume(self, model: nn.Module) -> None:
        """When a checkpoint has been loaded."""

    def after_step(self, model: nn.Module, step: int) -> None:
        """On every rank after each optimizer step, and before what is due after it (evaluation, save).

        `step` counts finished steps, from 1. Also after a step whose update was left out, of which a host
        with GPUs does not know yet: the weights are those from before it.
        """

    def after_evaluation(self, _scores: Mapping[str, float]) -> bool:
        """On every rank after each evaluation, with its scores, equal on all. True ends the run: it is
        finished, saved at this step, and complete for whoever resumes it. What rank 0 says counts."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What the task itself remembers (a best score, averaged weights), equal on all ranks; saved with
        every checkpoint. Tensors, numbers, text, lists and dicts."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What `state_dict` gave, before `after_resume`."""

    def sample_weights(self, _train: Any) -> Any:
        """How often each sample of the training set is drawn, in proportion: [n], none below 0."""
        return None

    def sample_lengths(self, _train: Any) -> Any:
        """The length of each sample of the training set [n], for global batches of samples much alike."""
        return None

    def weight(self, batch: Any) -> Tensor | float:
        """What the mean in `loss` is taken over, such as the tokens that count; by the batch alone.

        The gradient of a step is that of the mean over this of the whole global batch.
        """
        return batch_size_of(batch)

    def evaluate_all(self, _outputs: dict[str, Any]) -> Mapping[str, float]:
        """Scores from all ranks' outputs: each sample's once, in the order of the evaluation set, on a host.
        On rank 0 alone; all get what it says. `evaluate_batch` gives (sums, outputs) then."""
        return {}

    def evaluate_batch(self, model: nn.Module, batch: Any) -> Sums | tuple[Sums, Outputs]:
        """Sums for the scores of an evaluation; `loss` gives them where this is not there."""
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
        for attribute in given.keys() - values.keys():
            if hasattr(task, attribute):
                setattr(task, attribute, given[attribute])
    except TandemError:
        raise
    except Exception as error:
        raise ConfigError(f"task {name} cannot be made with the fields given ({where(error)})") from error
    return cast(Task, task)


def task_class(name: str) -> type[Any]:
    """The class that `name` stands for, imported; ConfigError as `load_task`."""
    name, location, class_name = asked = parsed(name)
    module = _module_of_file(Path(location)) if asked.is_file else _module_of_name(location, name)
    if not class_name:
        return _without_near_misses(_only_task(module, name))
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        classes = [candidate.__name__ for candidate in _task_classes(module)]
        raise ConfigError(f"{location} has no class {class_name!r}; task classes in it: {_listed(classes)}")
    if absent := _absent(found):
        raise ConfigError(
            f"{name} is no task: add {_listed(absent)} (a task has {_listed(REQUIRED_METHODS)})"
        )
    return _without_near_misses(found)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file under a name of its own; its folder joins the search path's end, for its neighbours."""
    path = path.resolve()
    name = f"tandem_task_{path.stem}"
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, path
    _search_also(path.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"task file {path} cannot be imported ({where(error)})") from error
    return module


def _module_of_name(location: str, name: str) -> ModuleType:
    _search_also(Path.cwd())
    try:
        return importlib.import_module(location)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{location}.".startswith(f"{missing}."):
            raise ConfigError(f"task {name!r}: there is no module {missing!r}; {VALID}") from error
        raise ConfigError(f"task module {location} cannot be imported ({where(error)})") from error


def _search_also(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _only_task(module: ModuleType, name: str) -> type[Any]:
    classes = _task_classes(module)
    is_file = name.endswith(".py")
    if not classes:
        raise ConfigError(
            f"{name} has 0 task classes: a task is a class with {_listed(REQUIRED_METHODS)}; a script with a "
            f"loop of its own is started without --task: tandem launch {'' if is_file else '-m '}{name}"
        )
    if len(classes) != 1:
        names = _listed([found.__name__ for found in classes])
        raise ConfigError(f"{name} has {len(classes)} task classes ({names}): name one, as in {name}:MyTask")
    return classes[0]


def _task_classes(module: ModuleType) -> list[type[Any]]:
    classes = (found for _, found in inspect.getmembers(module, inspect.isclass))
    return [found for found in classes if found.__module__ == module.__name__ and not _absent(found)]


def _absent(found: type[Any]) -> list[str]:
    """Methods that every task has and this class has not."""
    return [method for method in REQUIRED_METHODS if not callable(getattr(found, method, None))]


def _without_near_misses(found: type[Any]) -> type[Any]:
    """`found`; ConfigError for a method that is nearly one a task may have: it would never be called."""
    optional = [name for name in vars(WholeTask) if name[0] != "_" and not hasattr(found, name)]
    for name, _ in inspect.getmembers(found, inspect.isroutine):
        if name[0] == "_" or hasattr(WholeTask, name) or name in REQUIRED_METHODS:
            continue
        near = MEANT.get(name) or next(iter(get_close_matches(name, optional, n=1, cutoff=NEAR)), None)
        if near in optional:
            raise ConfigError(
                f"{found.__name__}.{name} would never be called; did you mean {near}? "
                f"A helper of your own can be called _{name}"
            )
    return found


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
