"""How long a rank's steps take without the wait for other ranks, of a program that tells nothing.

The wait for gradients is told apart as in `telemetry/clock.py`: DDP waits in a callback at the end of
backward. One of ours runs before it and one behind; they are queued by a hook on one parameter, which does
nothing to its gradient. Other waits, such as those for a collective of the program's own, count as work.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from tandem.telemetry.meter import StepTimes

RECENT_STEPS, FEWEST_STEPS = 50, 10
MAX_HOOKS = 5
RECENT_PLACES = 200  # beats, at four a second


class Pace:
    """One rank's recent steps. Told by the training thread, read from any. Imports torch when it is told."""

    def __init__(self) -> None:
        self._timer: Any = None
        self._times: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        self._places: deque[str] = deque(maxlen=RECENT_PLACES)
        self._hooks, self._has_waited = 0, False

    def stepped(self, optimizer: Any) -> None:
        """A step is over, by this optimizer."""
        parameter = _parameter(optimizer)
        if self._timer is None:
            self._timer = _timer(parameter)
        else:
            self._timer.mark("optimizer")
            self._times += self._timer.end()
        if not self._has_waited and self._hooks < MAX_HOOKS and parameter is not None:
            self._hooks += 1  # also where the parameters have become others meanwhile
            with suppress(RuntimeError, AttributeError):
                parameter.register_post_accumulate_grad_hook(self._in_backward)
        self._has_waited = False
        self._timer.begin()

    def seen_at(self, place: str) -> None:
        """Between two looks, the program was here and waited for nobody."""
        self._places.append(place)

    def typical(self) -> tuple[float | None, float | None, str | None]:
        """(own time, own time of a quick step, line with most of it); None as long as it is not known."""
        own = sorted(step.own for step in tuple(self._times))
        if len(own) < FEWEST_STEPS:
            return None, None, None
        places: Sequence[tuple[str, int]] = Counter(tuple(self._places)).most_common(1)
        return median(own), own[len(own) // 4], places[0][0] if places else None

    def _in_backward(self, _parameter: object) -> None:
        from tandem.torch_private import around_the_wait

        around_the_wait(self._computed, self._waited)

    def _computed(self) -> None:
        self._timer.mark("other")

    def _waited(self) -> None:
        self._timer.mark("wait")
        self._has_waited = True


def _parameter(optimizer: Any) -> Any:
    """One of its parameters that a backward pass comes to."""
    for group in optimizer.param_groups:
        for parameter in reversed(group["params"]):
            if parameter.requires_grad and parameter.is_leaf:
                return parameter
    return None


def _timer(parameter: Any) -> Any:
    from tandem.telemetry.clock import DeviceTimer, HostTimer

    return DeviceTimer(parameter.device) if parameter is not None and parameter.is_cuda else HostTimer()
