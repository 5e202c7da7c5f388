"""When the parts of a step happened, without making the host wait for the device.

On CPUs the host's clock tells. On GPUs the host runs ahead of the device, so events are put on the stream
and read a few steps later, when they have passed anyway.
"""

import time
from collections import deque
from typing import Any, Protocol

import torch
from torch import Tensor

from tandem.telemetry.meter import StepTimes
from tandem.torch_private import after_gradients

RING_STEPS = 4
"""Steps that a GPU may be behind the host before the host waits for the oldest one's events."""


class StepClock(Protocol):
    """The marks of a step, in the order they are called; a step of several passes repeats the middle ones."""

    def begin(self) -> None:
        """The step begins, and with it the wait for data."""
        ...

    def pause(self) -> None:
        """Something that belongs to no step comes now, such as an evaluation."""
        ...

    def got_data(self) -> None: ...
    def transferred(self) -> None: ...
    def forward_done(self, loss: Tensor) -> None:
        """Backward begins from `loss`."""
        ...

    def backward_done(self) -> None: ...

    def end(self) -> list[StepTimes]:
        """The step is over: its times, or on GPUs those of earlier steps that have come in by now."""
        ...

    def drain(self) -> list[StepTimes]:
        """The times that have not come in yet; on GPUs this waits for the device."""
        ...


def step_clock(device: torch.device) -> "StepClock":
    """The clock that fits the device."""
    return DeviceClock() if device.type == "cuda" else HostClock()


class HostClock:
    """Times of the host, which on CPUs are those of the work."""

    def __init__(self) -> None:
        self._clock = time.perf_counter
        self.begin()

    def begin(self) -> None:
        self._began = self._last = self._computed = self._clock()
        self._data = self._transfer = self._forward = self._backward = self._wait = 0.0

    def pause(self) -> None:
        """Nothing to do: `begin` looks at the clock."""

    def _lap(self) -> float:
        now = self._clock()
        seconds, self._last = now - self._last, now
        return seconds

    def got_data(self) -> None:
        self._data += self._lap()

    def transferred(self) -> None:
        self._transfer += self._lap()

    def forward_done(self, loss: Tensor) -> None:
        self._forward += self._lap()
        self._computed = 0.0
        after_gradients(loss, self._gradients_done)

    def _gradients_done(self) -> None:
        self._computed = self._clock()

    def backward_done(self) -> None:
        seconds = self._lap()
        waited = self._last - self._computed if self._computed else 0.0
        self._wait += waited
        self._backward += seconds - waited

    def end(self) -> list[StepTimes]:
        optimizer = self._lap()
        parts = (self._data, self._transfer, self._forward, self._backward, optimizer)
        other = self._last - self._began - sum(parts) - self._wait
        return [StepTimes(*parts, max(0.0, other), self._wait)]

    def drain(self) -> list[StepTimes]:
        return []


class DeviceClock:
    """Times between events on the current CUDA stream; `data` is how long the device stood idle for it."""

    def __init__(self) -> None:
        self._steps: deque[list[tuple[str, Any]]] = deque()
        self._marks: list[tuple[str, Any]] = []
        self._previous_end: Any = None

    def begin(self) -> None:
        # The last step's end: from there the device waits for data. At first there is none.
        self._marks = [("", self._previous_end or self._event())]

    def pause(self) -> None:
        self._previous_end = None

    def _event(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _mark(self, phase: str) -> None:
        self._marks.append((phase, self._event()))

    def got_data(self) -> None:
        self._mark("data")

    def transferred(self) -> None:
        self._mark("transfer")

    def forward_done(self, loss: Tensor) -> None:
        self._mark("forward")
        after_gradients(loss, lambda: self._mark("backward"))

    def backward_done(self) -> None:
        self._mark("wait" if self._marks[-1][0] == "backward" else "backward")

    def end(self) -> list[StepTimes]:
        self._mark("optimizer")
        self._previous_end = self._marks[-1][1]
        self._steps.append(self._marks)
        times = []
        while self._steps and (len(self._steps) > RING_STEPS or self._steps[0][-1][1].query()):
            times.append(self._oldest())
        return times

    def drain(self) -> list[StepTimes]:
        return [self._oldest() for _ in range(len(self._steps))]

    def _oldest(self) -> StepTimes:
        marks = self._steps.popleft()
        marks[-1][1].synchronize()
        return _between(marks)


def _between(marks: list[tuple[str, Any]]) -> StepTimes:
    seconds = dict.fromkeys(StepTimes.__dataclass_fields__, 0.0)
    for (_, before), (phase, event) in zip(marks, marks[1:], strict=False):
        seconds[phase] += before.elapsed_time(event) / 1e3
    return StepTimes(**seconds)
