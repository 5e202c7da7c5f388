"""`step` and `epoch` for those methods of a task that ask for them, by having parameters of these names."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any

NAMES = ("step", "epoch")


@dataclass
class Moment:
    """The optimizer step that is being taken, or was taken last; 0-based, and 0 before the first.

    `epoch_steps`: in an epoch.
    """

    step: int = 0
    epoch_steps: int = 1

    @property
    def epoch(self) -> int:
        """The 0-based epoch that `step` belongs to."""
        return self.step // self.epoch_steps

    def resume(self, finished: int, epoch_steps: int) -> None:
        """After so many `finished` steps."""
        self.step, self.epoch_steps = max(finished - 1, 0), epoch_steps


class Asking:
    """A method that is told those of NAMES that it has parameters for: of `moment`, or as `at` says."""

    def __init__(self, method: Callable[..., Any], names: tuple[str, ...], moment: Moment) -> None:
        self.method, self._names, self._moment = method, names, moment
        update_wrapper(self, method, updated=())  # it is found, and named, as the method itself

    def __call__(self, *given: Any) -> Any:
        return self.at(self._moment.step, self._moment.epoch, *given)

    def at(self, step: int, epoch: int, *given: Any) -> Any:
        """Of this step, whichever is being taken: batches are made before theirs begins."""
        told = dict(zip(NAMES, (step, epoch), strict=True))
        return self.method(*given, **{name: told[name] for name in self._names})


def asking(method: Any, given: int, moment: Moment) -> Any:
    """`method`, which takes `given` arguments, by way of `Asking` where it asks for more; else as it is."""
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # a builtin says nothing of what it takes
        return method
    named = [
        each.name
        for place, each in enumerate(parameters)
        if each.kind is each.KEYWORD_ONLY or (each.kind is each.POSITIONAL_OR_KEYWORD and place >= given)
    ]
    names = tuple(name for name in NAMES if name in named)
    return Asking(method, names, moment) if names else method
