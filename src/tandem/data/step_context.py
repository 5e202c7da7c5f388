"""Pass `step` and `epoch` to those methods of a task that have parameters with these names."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

NAMES = ("step", "epoch")


@dataclass
class StepContext:
    """The current or last optimizer step, 0-based; 0 before the first one.

    `epoch_steps`: the number of steps in an epoch.
    """

    step: int = 0
    epoch_steps: int = 1

    @property
    def epoch(self) -> int:
        """The 0-based epoch that contains `step`."""
        return self.step // self.epoch_steps

    def resume(self, finished: int, epoch_steps: int) -> None:
        """Set the state after `finished` steps."""
        self.step = max(finished - 1, 0)
        self.epoch_steps = epoch_steps


class WithStepContext:
    """A method that receives `step` and `epoch`, as far as it has these parameters.

    They are those of `moment`, unless `at` gives others.
    """

    def __init__(self, method: Callable[..., Any], names: tuple[str, ...], moment: StepContext) -> None:
        self.method = method
        self._names = names
        self._moment = moment
        # Keep the method's name and signature for lookups and messages.
        update_wrapper(self, method, updated=())

    def __call__(self, *given: Any) -> Any:
        return self.at(self._moment.step, self._moment.epoch, *given)

    def at(self, step: int, epoch: int, *given: Any) -> Any:
        """Call the method for the given step, because batches are prepared before their step begins."""
        values = dict(zip(NAMES, (step, epoch), strict=True))
        return self.method(*given, **{name: values[name] for name in self._names})


def asking(method: Any, given: int, moment: StepContext) -> Any:
    """Wrap `method` in `WithStepContext` if it has more than `given` parameters, among them one of NAMES."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # a builtin may have no signature
        return method
    named = [
        each.name
        for index, each in enumerate(parameters)
        if each.kind is each.KEYWORD_ONLY or (each.kind is each.POSITIONAL_OR_KEYWORD and index >= given)
    ]
    names = tuple(name for name in NAMES if name in named)
    return WithStepContext(method, names, moment) if names else method
