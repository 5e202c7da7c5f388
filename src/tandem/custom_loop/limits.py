"""Reject settings and objects that a custom loop does not support, with what to do instead."""

import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from tandem.config import Settings
from tandem.distributed.replica import Replica
from tandem.distributed.strategy.ddp import listed
from tandem.errors import ConfigError
from tandem.training.buffers import is_lazy

log = logging.getLogger("tandem.run")


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for settings of work that a custom loop does itself."""
    compute = settings.compute
    if compute.strategy not in ("ddp", "single"):
        raise ConfigError(
            f"--strategy {compute.strategy} works only in tasks; a custom loop needs ddp or single"
        )
    if settings.exchange.powersgd_rank is not None:
        raise ConfigError(
            "--gradient-compression powersgd works only in tasks: it expects one backward pass per step, but "
            "a custom loop may take several; use bf16 or fp16"
        )
    if compute.precision != "fp32":
        raise ConfigError(
            f"--precision {compute.precision} works only in tasks; in a custom loop use torch.autocast"
        )
    if settings.reliability.replay_check != "never":
        raise ConfigError(
            "--replay-check works only in tasks: no other rank knows how to repeat a step of a custom loop"
        )
    if compute.compile is not None:
        raise ConfigError(
            "--compile works only in tasks; in a custom loop call torch.compile on the wrapped model"
        )


def check_batch_size(batch_size: int, saved: Any) -> None:
    """Raise ConfigError if the batch size has changed.

    The position in the data is a step, which refers to the same samples only with the same batch size.
    """
    before = batch_size if saved is None else saved.get("batch_size", batch_size)
    if before != batch_size:
        raise ConfigError(
            f"cannot resume: batch_size was {before} and is {batch_size} now; restore the old value, or use "
            "another --run-dir or --resume never"
        )


def check_dataset(dataset: Any) -> None:
    """Raise ConfigError for an object that yields batches, or nothing, instead of samples."""
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise ConfigError(f"run.batches: got a {kind}; expected a dataset: pass loader.dataset")
    if kind in ("_SingleProcessDataLoaderIter", "_MultiProcessingDataLoaderIter"):
        raise ConfigError("run.batches: got the iterator of a DataLoader; expected a dataset")
    if not any(hasattr(dataset, name) for name in ("__getitem__", "__iter__", "of_rank")):
        raise ConfigError(f"run.batches: invalid type {kind}; expected a dataset")


@contextmanager
def hints_as_arguments(chosen: Collection[str]) -> Iterator[None]:
    """Name arguments of run.batches in errors, instead of flags that are not in `chosen`."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for name in ("batch_size", "steps", "epochs"):
            if name not in chosen:
                flag = "--" + name.replace("_", "-")
                text = text.replace(f"{flag} ", f"{name}=").replace(flag, f"{name}=")
        raise ConfigError(text.replace("=: ", ": ")) from error


def check_model(model: object) -> None:
    """Raise ConfigError for an object that `Run.wrap` cannot wrap."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"run.wrap: invalid type {type(model).__name__}; expected a torch.nn.Module")
    named = [*model.named_parameters(), *model.named_buffers()]
    if names := [name for name, value in named if is_lazy(value)]:
        raise ConfigError(
            f"run.wrap got a model with lazy modules, which have no sizes yet ({listed(names)}); call the "
            "model on a sample before run.wrap, or set the sizes, as in nn.Linear(in, out)"
        )


class AveragedParameters:
    """The parameters whose gradients ranks average: those that required one in `Run.wrap`.

    DDP ignores a layer that is unfrozen or created later, so each rank would train it with its own gradients.
    """

    def __init__(self) -> None:
        self._models: list[nn.Module] = []
        self._known = set[int]()

    def watch(self, model: nn.Module) -> None:
        """Include one more model, wrapped or frozen."""
        self._models.append(model)
        if isinstance(model, Replica):
            self._known |= model.handled

    def check(self, trained: Sequence[nn.Parameter]) -> None:
        """Raise ConfigError if a gradient of `trained`, the parameters of an optimizer, is not averaged."""
        # Walking through the modules takes ten times as long, so look there only for the names.
        if not self._models or not any(map(self._is_missed, trained)):
            return
        for model in self._models:
            if names := [name for name, p in model.named_parameters() if self._is_missed(p)]:
                raise ConfigError(
                    f"the ranks do not average the gradients of {listed(names)}, because run.wrap got the "
                    "model before these were trained; freeze layers after run.wrap, not before it, and set "
                    "TANDEM_FIND_UNUSED=true"
                )
        # They are in no wrapped model, so do not look there again at every step.
        self._known |= {id(p) for p in trained if self._is_missed(p)}

    def _is_missed(self, parameter: nn.Parameter) -> bool:
        return id(parameter) not in self._known and parameter.grad is not None and parameter.requires_grad


# Detect `loss.backward()` where a loop needs `run.backward(loss)`.
#
# Such gradients are not checked, and the step's loss is not reported. A hook on each parameter records which
# backward pass added to its gradient last.


# "<" is for frames such as <frozen runpy> and <string>.
INSTALLED = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")
"""Prefixes of file names that do not belong to the script."""
WATCHED_STEPS = 2
"""The number of steps after which parameters that run.backward has reached are no longer watched."""


class PlainBackward:
    """Track which gradients come from a backward pass other than `run.backward`."""

    def __init__(self) -> None:
        self.is_ours = False
        """Whether `run.backward` is running."""
        self._handles = dict[int, Any]()
        self._reached = set[int]()
        self._plain = set[int]()
        self._location = ""  # the line of the last plain backward pass in the script
        self._is_used = self._has_warned = False
        """Whether this step used or made gradients without `run.backward`; whether that was logged once."""

    def watch(self, model: nn.Module) -> None:
        """Watch the parameters of one more wrapped model."""
        for parameter in model.parameters():
            # Only leaves accumulate gradients, and torch refuses the hook for other tensors.
            if parameter.requires_grad and parameter.is_leaf and id(parameter) not in self._handles:
                hook = self._accumulated
                self._handles[id(parameter)] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        if self.is_ours:
            self._reached.add(id(parameter))
            self._plain.discard(id(parameter))
            return
        self._is_used = True
        # Only the first parameter of the pass looks up the line; a walk through the frames for each would
        # take time.
        if not self._plain:
            self._location = _location_in_script()
        self._plain.add(id(parameter))

    def before_optimizer(self, parameters: Iterable[torch.Tensor]) -> None:
        """Raise ConfigError if an optimizer is about to use gradients of a plain backward pass."""
        for parameter in parameters if self._handles else ():
            if parameter.grad is None or id(parameter) not in self._handles:
                continue
            if id(parameter) in self._plain:
                location = self._location or _location_in_script()
                raise ConfigError(
                    f"{location and f'{location}: '}this step had no run.backward: replace loss.backward() "
                    "with run.backward(loss)"
                )
            self._is_used = True

    def end_step(self, step: int, had_backward: bool, steps: int) -> None:
        """Warn once if `step` trained in a way that cannot be checked.

        `steps` counts the steps of this process.
        """
        if not had_backward and self._is_used and not self._has_warned:
            self._has_warned = True
            log.warning(
                "step %d had no run.backward: its loss is not reported, and values that are not finite "
                "are not detected; use run.backward(loss) instead of loss.backward()",
                step + 1,
            )
        self._is_used = False
        # Hooks slow down each backward pass, and a parameter that run.backward has reached is in the right
        # loop.
        if steps >= WATCHED_STEPS:
            for each in self._reached & self._handles.keys():
                self._handles.pop(each).remove()
            self._reached.clear()


def _location_in_script() -> str:
    """Return `train.py line 12`, or "" in a thread of the autograd engine.

    Such a thread has no frame of the script.
    """
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(INSTALLED):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"
