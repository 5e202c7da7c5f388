"""One clock of a rank's phases: the loop and the step say once what begins, everybody else reads it here.

There are two levels. A run is in one activity (`with clock.phase("eval"):`), and a step, inside the
activity "train", goes through its phases (`clock.enter("forward")`). Heartbeat, meter, displays and log
are readers. Telling costs a few hundred nanoseconds and never waits for a device: on CPUs the host's
clock says how long a phase was; on GPUs, where the host runs ahead, events are put on the stream and
read a few steps later, when they have passed anyway.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tandem import running
from tandem.telemetry.meter import StepTimes
from tandem.torch_private import after_gradients, around_compilation

STEP_PHASES = ("data", "transfer", "forward", "backward", "optimizer", "between")
"""What the training thread is in while it trains, in the order of a step."""
KERNEL_PHASES = ("forward", "backward", "optimizer")
"""Those in which a device computes; in the others it may wait for another rank."""
RING_STEPS = 4
"""Steps that a GPU may be behind the host before the host waits for the oldest one's events."""
RECENT_STEPS = 50


class Clock:
    """Where one rank is. Told by the training thread alone, read from any.

    `step` counts finished steps; `current` is the finest phase known, since `since` (`running.now`);
    `entered` counts its changes. `on_activity` is called when another activity has begun.
    """

    def __init__(self) -> None:
        self._timer: HostTimer | DeviceTimer = HostTimer()
        self.activity = self.current = "startup"
        self.since, self.entered = running.now(), 0
        self.step = self.first_step = 0
        self.on_activity: Callable[[], None] = lambda: None
        self.computes_alone = False
        """Whether only the wait behind backward holds collectives: no forward pass, backward or optimizer."""
        self._knows_wait = False
        self._compilations: list[str] = []  # the phases that those under way have begun in
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self.longest_step = 0.0
        """Seconds of the longest step so far."""
        self._step_began, self._open = self.since, "other"
        self.recent: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        """Times of the last steps whose times are known."""

    def measure(self, device: torch.device) -> None:
        """From now on steps are timed where they run."""
        self._timer = DeviceTimer(device) if device.type == "cuda" else HostTimer()

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """The run does something else inside (one of meter.ACTIVITIES); its time belongs to no step."""
        before = self.activity
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, activity: str) -> None:
        """The run goes on to another activity."""
        self.activity = activity
        self._enter("between" if activity == "train" else activity)
        self._step_began = self.since
        self._timer.pause()
        self.on_activity()

    def resume(self, step: int) -> None:
        """`step` steps are finished before this process takes its first."""
        self.step = self.first_step = step

    def begin_step(self) -> None:
        """The next step begins, with the wait for its data."""
        self._enter("data")
        self._open = "data"
        self._timer.begin()

    def enter(self, phase: str) -> None:
        """The next of a step's phases begins and ends the one before; the same again changes nothing."""
        if phase != self.current:
            self._timer.mark(self._open)
            self._open = phase
            self._enter(phase)

    def enter_backward(self, loss: Tensor) -> None:
        """Backward begins from `loss`: its own work, then the wait for the gradients of other ranks."""
        self.enter("backward")
        after_gradients(loss, self._gradients_done)

    def end_step(self) -> list[StepTimes]:
        """The step is over: its times, or on GPUs those of earlier steps that have come in by now."""
        self._timer.mark(self._open)
        self.step += 1
        if self.step == self.first_step + 1:  # the compiler is imported by now, if it is used
            around_compilation(self._compiles, self._compiled)
        self._enter("between")
        self._durations.append(self.since - self._step_began)
        self.longest_step = max(self.longest_step, self._durations[-1])
        self._step_began = self.since
        times = self._timer.end()
        self.recent += times
        return times

    def pause(self) -> None:
        """Something that belongs to no step comes now, such as a line of the log."""
        self._timer.pause()

    def drain(self) -> list[StepTimes]:
        """The times that have not come in yet; on GPUs this waits for the device."""
        return self._timer.drain()

    @property
    def is_of_host(self) -> bool:
        """Whether work is done when the host has gone on: on CPUs."""
        return isinstance(self._timer, HostTimer)

    def kernel(self) -> tuple[str, int] | None:
        """(Phase, finished steps before it) of what a GPU computes now, from any thread; waits for nothing.

        None on CPUs, where the GPU does nothing, waits for other ranks, or may do so.
        """
        found = self._timer.unfinished() if self.computes_alone else None
        if found is None or found[0] not in KERNEL_PHASES:
            return None
        phase, ago = found
        return None if phase == "backward" and not self._knows_wait else (phase, self.step - ago)

    @property
    def has_trained(self) -> bool:
        """Whether this process has finished a step."""
        return self.step > self.first_step

    @property
    def typical_step(self) -> float:
        """Seconds of the middle one of the last RECENT_STEPS steps, which a rare long one does not change."""
        return median(tuple(self._durations) or (0.0,))

    def stamp(self, record: logging.LogRecord) -> bool:
        """A filter for logging handlers: lines know the step at which they were written."""
        if self.step and not hasattr(record, "step"):
            record.step = self.step
        return True

    def _enter(self, phase: str) -> None:
        self.current, self.since = phase, running.now()
        self.entered += 1

    def _compiles(self) -> None:
        """A shape that is new compiles again, for as long as the first step took: a phase of its own."""
        self._compilations.append(self.current)
        self._enter("compile")

    def _compiled(self) -> None:
        self._enter(self._compilations.pop())

    def _gradients_done(self) -> None:
        self._knows_wait = True
        self._timer.mark("backward")
        self._open = "wait"


class HostTimer:
    """Times of the host, which on CPUs are those of the work."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """A step begins."""
        self._spent = dict.fromkeys(StepTimes.__dataclass_fields__, 0.0)
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """What ends now was `phase`."""
        now = time.perf_counter()
        self._spent[phase] += now - self._last
        self._last = now

    def end(self) -> list[StepTimes]:
        """Times of steps that are known by now."""
        return [StepTimes(**self._spent)]

    def pause(self) -> None:
        """Nothing to do: `begin` looks at the clock."""

    def drain(self) -> list[StepTimes]:
        return []

    def unfinished(self) -> tuple[str, int] | None:
        """What the host has asked for is done."""
        return None


class DeviceTimer:
    """Times between events on the current CUDA stream; `data` is how long the device stood idle for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, Any]]] = deque()
        self._marks: list[tuple[str, Any]] = []
        self._previous_end: Any = None

    def begin(self) -> None:
        # The last step's end: from there the device waits for data. At first there is none.
        self._marks = [("", self._previous_end or _event())]

    def mark(self, phase: str) -> None:
        self._marks.append((phase, _event()))

    def end(self) -> list[StepTimes]:
        self._previous_end = self._marks[-1][1]
        self._steps.append(self._marks)
        times = []
        while self._steps and (len(self._steps) > RING_STEPS or self._steps[0][-1][1].query()):
            times.append(self._oldest())
        return times

    def pause(self) -> None:
        self._previous_end = None

    def drain(self) -> list[StepTimes]:
        return [self._oldest() for _ in range(len(self._steps))]

    def unfinished(self) -> tuple[str, int] | None:
        """(Phase, how many steps ago) of the first event that the device has not passed; None: it has all.

        For another thread than the one that trains. One without a device would begin to use the first GPU.
        """
        with suppress(RuntimeError):  # the training thread went on meanwhile, or the GPU has failed
            steps = [*self._steps]
            torch.cuda.set_device(self._device)
            for index, marks in enumerate([*steps, self._marks]):
                for phase, event in [*marks]:
                    if not event.query():
                        return phase, len(steps) - index
        return None

    def _oldest(self) -> StepTimes:
        marks = self._steps.popleft()
        marks[-1][1].synchronize()
        seconds = dict.fromkeys(StepTimes.__dataclass_fields__, 0.0)
        for (_, before), (phase, event) in zip(marks, marks[1:], strict=False):
            seconds[phase] += before.elapsed_time(event) / 1e3
        return StepTimes(**seconds)


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
