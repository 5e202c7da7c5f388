"""The clock of a rank's phases: the loop and the step report each phase's start, and other modules read it.

There are two levels. A run has one activity (`with clock.phase("eval"):`). Within the activity "train", a
step goes through its phases (`clock.enter("forward")`). Heartbeat, meter, displays and log are readers. A
report takes a few hundred nanoseconds and never waits for a device. On CPUs, the host's clock measures a
phase. On GPUs, where the host runs ahead, events are recorded on the stream and read a few steps later, when
they have completed anyway.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from tandem import running_clock
from tandem.telemetry import profiling
from tandem.telemetry.collective_waits import observe_waits
from tandem.telemetry.meter import TIMES, StepTimes
from tandem.torch_private import after_gradients, around_compilation

STEP_PHASES = ("data", "transfer", "forward", "backward", "optimizer", "between")
"""Phases of the training thread, in the order of a step."""
KERNEL_PHASES = ("forward", "backward", "optimizer")
"""Phases in which a device computes; in the others it may wait for another rank."""
RING_STEPS = 4
"""Steps by which a GPU may lag before the host waits for the oldest step's events."""
RECENT_STEPS = 50


class Clock:
    """The position of one rank. Written only by the training thread, read from any thread.

    `step` counts finished steps; `current` is the most specific phase known, since `since`
    (`running_clock.now`); `entered` counts its changes. `on_activity` is called when a new activity has
    begun.
    """

    def __init__(self) -> None:
        self._timer: HostTimer | DeviceTimer = HostTimer()
        self.activity = self.current = "startup"
        self.since = running_clock.now()
        self.entered = 0
        self.step = self.first_step = 0
        self.on_activity: Callable[[], object] = lambda: None
        self.computes_alone = False
        """True if only the wait after backward has collectives, and no forward, backward or optimizer."""
        self._knows_wait = False
        self._compilations: list[str] = []  # the phases in which unfinished compilations began
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self.longest_step = 0.0
        """Duration of the longest step so far, in seconds."""
        self._step_began = self.since
        self._open = "other"
        self.recent: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        """Times of the most recent steps that are known."""

    def measure(self, device: torch.device) -> None:
        """Time steps on the device from now on."""
        self._timer = DeviceTimer(device) if device.type == "cuda" else HostTimer()

    @contextmanager
    def phase(self, activity: str) -> Iterator[None]:
        """Mark another activity inside the block (one of meter.ACTIVITIES); its time counts for no step."""
        before = self.activity
        self.begin(activity)
        try:
            yield
        finally:
            self.begin(before)

    def begin(self, activity: str) -> None:
        """Switch to another activity."""
        self.activity = activity
        self._enter("between" if activity == "train" else activity)
        self._step_began = self.since
        self._timer.pause()
        self.on_activity()

    def resume(self, step: int) -> None:
        """Start at `step` finished steps, before this process takes its first step."""
        self.step = self.first_step = step

    def begin_step(self) -> None:
        """Begin the next step, with the wait for its data."""
        self._enter("data")
        self._open = "data"
        self._timer.begin()

    def enter(self, phase: str) -> None:
        """End the current phase of the step and begin the next; the same phase again changes nothing."""
        if phase != self.current:
            self._timer.mark(self._open)
            self._open = phase
            self._enter(phase)

    def enter_backward(self, loss: Tensor) -> None:
        """Begin backward from `loss`: its own work, then the wait for the gradients of other ranks."""
        self.enter("backward")
        # See docs/architecture.md#measuring-a-ranks-own-time.
        after_gradients(loss, self._gradients_done)

    def end_step(self) -> list[StepTimes]:
        """End the step; return its times, or on GPUs those of earlier steps that are known by now."""
        self._timer.mark(self._open)
        self.step += 1
        if self.step == self.first_step + 1:  # if a compiler is used, it is imported by now
            around_compilation(self._compiles, self._compiled)
            if isinstance(self._timer, HostTimer):
                observe_waits(partial(self._wait_begins, self._timer), self._timer.waited)
        self._enter("between")
        self._durations.append(self.since - self._step_began)
        self.longest_step = max(self.longest_step, self._durations[-1])
        self._step_began = self.since
        times = self._timer.end()
        self.recent += times
        profiling.step_ended(self.step)
        return times

    def pause(self) -> None:
        """Exclude the time from here on from all steps, for example for a log line."""
        self._timer.pause()

    def drain(self) -> list[StepTimes]:
        """Return the times that are still pending; on GPUs this waits for the device."""
        return self._timer.drain()

    @property
    def cpu_time_shows_progress(self) -> bool:
        """True if work is done when the host continues: on CPUs."""
        return isinstance(self._timer, HostTimer)

    def kernel(self) -> tuple[str, int] | None:
        """Return (phase, finished steps before it) of a GPU's current work, from any thread, without waiting.

        None on CPUs, and if the GPU does nothing or may wait for other ranks.
        """
        found = self._timer.unfinished() if self.computes_alone else None
        if found is None or found[0] not in KERNEL_PHASES:
            return None
        phase, ago = found
        # Without the callback, backward includes the wait for other ranks, so it proves nothing about this
        # rank. See docs/architecture.md#hangs.
        return None if phase == "backward" and not self._knows_wait else (phase, self.step - ago)

    @property
    def has_trained(self) -> bool:
        """True if this process has finished a step."""
        return self.step > self.first_step

    @property
    def typical_step(self) -> float:
        """The median duration of the last RECENT_STEPS steps, in seconds; rare long steps do not count."""
        # A copy, because the training thread appends to the deque meanwhile.
        return median(tuple(self._durations) or (0.0,))

    def stamp(self, record: logging.LogRecord) -> bool:
        """Add the current step to a log record; a filter for logging handlers."""
        if self.step and not hasattr(record, "step"):
            record.step = self.step
        return True

    def _enter(self, phase: str) -> None:
        self.current = phase
        self.since = running_clock.now()
        self.entered += 1

    def _compiles(self) -> None:
        """Mark a compilation as a separate phase: it may take as long as the first step's."""
        self._compilations.append(self.current)
        self._enter("compile")

    def _compiled(self) -> None:
        self._enter(self._compilations.pop())

    def _wait_begins(self, timer: "HostTimer") -> str:
        timer.mark(self._open)
        return self._open

    def _gradients_done(self) -> None:
        self._knows_wait = True
        self._timer.mark("backward")
        self._open = "wait"


class HostTimer:
    """Measures times with the host's clock, which on CPUs are the times of the work."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        self._spent = dict.fromkeys(TIMES, 0.0)
        self._waits = dict[str, float]()
        self._last = time.perf_counter()

    def mark(self, phase: str) -> None:
        """End the phase `phase`, or the part of it before a wait."""
        now = time.perf_counter()
        self._spent[phase] += now - self._last
        self._last = now

    def waited(self, phase: str) -> None:
        """End a wait for other ranks inside the phase `phase`."""
        now = time.perf_counter()
        self._waits[phase] = self._waits.get(phase, 0.0) + now - self._last
        self._last = now

    def end(self) -> list[StepTimes]:
        """Return the times of steps that are known by now."""
        waits = self._waits
        self._waits = {}  # waits before the next step belong to no step
        self._spent["wait"] += waits.pop("wait", 0.0)
        return [StepTimes(**self._spent, waits=waits)]

    def pause(self) -> None:
        """Nothing to do: `begin` reads the clock."""

    def drain(self) -> list[StepTimes]:
        return []

    def unfinished(self) -> tuple[str, int] | None:
        """Return None: work that the host has requested is already done."""
        return None


class DeviceTimer:
    """Times between events on the current CUDA stream; `data` is the device's idle time before a step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._steps: deque[list[tuple[str, Any]]] = deque()
        self._marks: list[tuple[str, Any]] = []
        self._previous_end: Any = None

    def begin(self) -> None:
        # The device waits for data from the end of the last step on. Before the first step it does not.
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
        # The idle time until the next step is then not a wait for data.
        self._previous_end = None

    def drain(self) -> list[StepTimes]:
        return [self._oldest() for _ in range(len(self._steps))]

    def unfinished(self) -> tuple[str, int] | None:
        """Return (phase, steps ago) of the first event that the device has not reached, or None.

        It is called from another thread. Without set_device, that thread would begin to use the first GPU.
        """
        with suppress(RuntimeError):  # the training thread continued meanwhile, or the GPU has failed
            # Copies, because the training thread changes both deque and lists meanwhile.
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
        seconds = dict.fromkeys(TIMES, 0.0)
        for (_, before), (phase, event) in zip(marks, marks[1:], strict=False):
            seconds[phase] += before.elapsed_time(event) / 1e3
        return StepTimes(**seconds, waits={})


def _event() -> Any:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
