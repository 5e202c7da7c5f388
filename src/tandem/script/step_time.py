"""Measure how long a script's steps take on this rank without the wait for other ranks.

The wait for gradients is measured as in `telemetry/clock.py`: DDP waits in a callback at the end of backward.
One of tandem's callbacks runs before it and one after it. A hook on one parameter queues them and does
nothing to its gradient. Other waits, such as the script's own collectives, count as work. See
docs/architecture.md#user-scripts.
"""

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from statistics import median
from typing import Any

from tandem.telemetry.meter import StepTimes

RECENT_STEPS = 50
FEWEST_STEPS = 10
MAX_HOOKS = 5
RECENT_PLACES = 200  # heartbeats, of which there are four a second


class Pace:
    """One rank's recent steps.

    The training thread writes it, and any thread may read it. Imports torch on first use.
    """

    def __init__(self) -> None:
        self._timer: Any = None
        self._times: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        self._locations: deque[str] = deque(maxlen=RECENT_PLACES)
        self._hooks = 0
        self._has_waited = False

    def stepped(self, optimizer: Any) -> None:
        """Record that a step of this optimizer is over."""
        parameter = _parameter(optimizer)
        if self._timer is None:
            self._timer = _timer(parameter)
        else:
            self._timer.mark("optimizer")
            self._times += self._timer.end()
        # The callbacks have not run in this step: there is no hook yet, or its parameter got no gradient.
        if not self._has_waited and self._hooks < MAX_HOOKS and parameter is not None:
            self._hooks += 1  # the parameters may have been replaced meanwhile
            with suppress(RuntimeError, AttributeError):
                parameter.register_post_accumulate_grad_hook(self._in_backward)
        self._has_waited = False
        self._timer.begin()

    def seen_at(self, location: str) -> None:
        """Record that the script was at `location`, not waiting for other ranks, at a heartbeat."""
        self._locations.append(location)

    def typical(self) -> tuple[float | None, float | None, str | None]:
        """Return (own time, own time of a fast step, the line with most of it); None while unknown.

        Times are in seconds.
        """
        own = sorted(step.own for step in tuple(self._times))
        if len(own) < FEWEST_STEPS:
            return None, None, None
        most_common: Sequence[tuple[str, int]] = Counter(tuple(self._locations)).most_common(1)
        return median(own), own[len(own) // 4], most_common[0][0] if most_common else None

    def _in_backward(self, _parameter: object) -> None:
        from tandem.torch_private import hook_gradient_wait

        hook_gradient_wait(self._computed, self._waited)

    def _computed(self) -> None:
        self._timer.mark("other")

    def _waited(self) -> None:
        self._timer.mark("wait")
        self._has_waited = True


def _parameter(optimizer: Any) -> Any:
    """Return a parameter that a backward pass reaches."""
    for group in optimizer.param_groups:
        # In reverse, because backward reaches the last parameters first.
        for parameter in reversed(group["params"]):
            if parameter.requires_grad and parameter.is_leaf:
                return parameter
    return None


def _timer(parameter: Any) -> Any:
    from tandem.telemetry.clock import DeviceTimer, HostTimer

    return DeviceTimer(parameter.device) if parameter is not None and parameter.is_cuda else HostTimer()
