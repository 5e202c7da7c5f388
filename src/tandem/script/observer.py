"""Observe a script that does not call tandem: its steps, its step time, and its position.

torch's global hook counts optimizer steps. `telemetry/heartbeat.py` sends heartbeats from a thread next to
the script. The rank's position comes from its stack: the innermost line of the script's own code, and whether
that line waits for other ranks. See docs/architecture.md#user-scripts.
"""

import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

from tandem import running_clock
from tandem.code_files import is_own, write_code
from tandem.distributed.position import Position
from tandem.script.job import Job
from tandem.telemetry import metrics, profiling
from tandem.telemetry.hangs import HangLimits
from tandem.telemetry.heartbeat import LOCATED_SECONDS, Heartbeats, Location
from tandem.telemetry.messages import Heartbeat, Samples, Send
from tandem.telemetry.meter import StepTimes
from tandem.telemetry.metrics import Sample
from tandem.telemetry.thread_activity import ThreadActivity, in_collective
from tandem.timeouts import PROGRESS_SECONDS

# Measure how long a script's steps take on this rank without the wait for other ranks.
#
# The wait for gradients is measured as in `telemetry/clock.py`: DDP waits in a callback at the end of
# backward. One of tandem's callbacks runs before it and one after it. A hook on one parameter queues them and
# does nothing to its gradient. On CPUs, waits in collectives that the script calls are measured as well; on
# GPUs they count as work. See docs/architecture.md#user-scripts.

RECENT_STEPS = 50
FEWEST_STEPS = 10
MAX_HOOKS = 5
RECENT_PLACES = 200  # heartbeats, at four per second


class StepHistory:
    """One rank's recent steps.

    The training thread writes it, and any thread may read it. Imports torch on first use.
    """

    def __init__(self) -> None:
        self._timer: Any = None
        self._times: deque[StepTimes] = deque(maxlen=RECENT_STEPS)
        self._locations: deque[str] = deque(maxlen=RECENT_PLACES)
        self._hooks = 0
        self._has_waited = False
        self._open = "other"

    def stepped(self, optimizer: Any) -> None:
        """Record that a step of this optimizer is over."""
        parameter = _parameter(optimizer)
        if self._timer is None:
            self._timer = _timer(parameter)
            self._observe_waits()
        else:
            self._timer.mark("optimizer")
            self._times += self._timer.end()
        # The callbacks have not run in this step: either there is no hook yet, or its parameter got no
        # gradient.
        if not self._has_waited and self._hooks < MAX_HOOKS and parameter is not None:
            self._hooks += 1  # the parameters may have been replaced meanwhile
            with suppress(RuntimeError, AttributeError):
                parameter.register_post_accumulate_grad_hook(self._in_backward)
        self._has_waited = False
        self._open = "other"
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
        self._open = "wait"

    def _waited(self) -> None:
        self._timer.mark("wait")
        self._open = "other"
        self._has_waited = True

    def _observe_waits(self) -> None:
        from tandem.telemetry.clock import HostTimer
        from tandem.telemetry.collective_waits import observe_waits

        timer = self._timer
        if isinstance(timer, HostTimer):
            observe_waits(lambda: timer.mark(self._open), lambda _: timer.waited(self._open))


def _parameter(optimizer: Any) -> Any:
    """Return a parameter that a backward pass reaches."""
    for group in optimizer.param_groups:
        # Search in reverse, because backward reaches the last parameters first.
        for parameter in reversed(group["params"]):
            if parameter.requires_grad and parameter.is_leaf:
                return parameter
    return None


def _timer(parameter: Any) -> Any:
    from tandem.telemetry.clock import DeviceTimer, HostTimer

    return DeviceTimer(parameter.device) if parameter is not None and parameter.is_cuda else HostTimer()


MAX_TIMES = 1000  # step times per message, which may have 64 KiB


class ScriptMonitor:
    """Count one rank's steps, and locate it by its stack for its heartbeats, from construction on.

    `imports`: the file for what the script has imported (`Grant.imports_file`).
    """

    def __init__(self, job: Job, position: Position, send: Send, imports: Path) -> None:
        self._position = position
        self._imports = imports
        self._send = send
        self._has_hang_timeout = job.hang_timeout is not None
        self._modules = set(sys.modules)
        self._counts: Counter[int] = Counter()  # by optimizer
        self._hook: Any = None
        self._is_silent = False
        self._lock = threading.Lock()
        self.steps = 0
        self._steps_sent = 0
        self._sent_at = 0.0
        self._ended_at = 0.0
        self._unsent = list[float]()
        self._longest = 0.0
        self._times: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_state = ""
        self._since = running_clock.now()
        self._history = StepHistory()
        if position.rank == 0:
            self._send_samples(
                metrics.WORLD_SIZE.set(position.world_size),
                metrics.NODES.set(position.nodes),
                metrics.GLOBAL_STEP.set(0),
            )
        self._count_steps()
        limits = HangLimits(job.hang_timeout, job.patience)
        self._heartbeats = Heartbeats(position.rank, self, send, limits)

    def hand_over(self) -> None:
        """Stop sending: from now on, the script itself reports its position."""
        # The heartbeat thread, which would install the hook, ends after this.
        self._count_steps()
        self._send_progress()
        self._is_silent = True
        self._heartbeats.end()

    def close(self) -> None:
        """Report the last steps."""
        self._send_progress()
        if not self._is_silent:
            self._heartbeats.send()

    def imported(self) -> list[str]:
        """Return the installed modules that the script has imported, in the order of their import."""
        new = [(name, module) for name, module in list(sys.modules.items()) if name not in self._modules]
        files = ((name, getattr(module, "__file__", None) or "<built-in>") for name, module in new)
        return [name for name, file in files if file != "<built-in>" and not is_own(file)]

    def _count_steps(self) -> None:
        """Hook into torch as soon as the script, or the fork server before it, has imported it."""
        register = getattr(
            sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None
        )
        if self._hook is None and register is not None:
            self._hook = register(self._after_step)

    def _after_step(self, optimizer: object, _args: object, _kwargs: object) -> None:
        """Count a step. With several optimizers (a GAN), the one that steps most often defines the steps."""
        # After `hand_over`, the first step still counts, because it records the imports.
        if self._is_silent and self.steps:
            return
        self._counts[id(optimizer)] += 1
        if self._counts[id(optimizer)] <= self.steps:
            return
        now = running_clock.now()
        with self._lock:
            if self.steps:  # the time before the first one belongs to the start
                self._times.append(now - self._ended_at)
                self._unsent.append(now - self._ended_at)
                self._longest = max(self._longest, now - self._ended_at)
            self.steps = self.steps + 1
            self._ended_at = now
        if not self._is_silent:
            self._history.stepped(optimizer)
            profiling.step_ended(self.steps)
        if self.steps == 1 and self._position.local_rank == 0:
            write_code(self._imports, self.imported())  # for the next generation's standby processes

    @property
    def cpu_time_shows_progress(self) -> bool:
        """True: a script that waits for a GPU cannot be told apart from one that computes."""
        return True

    def locate(self, now: float, thread: ThreadActivity) -> Location:
        """Return the location at `now`."""
        self._count_steps()
        place, in_distributed, in_autograd = where(thread.frame)
        # DDP waits for gradients in C++ inside backward, where no frame shows it. A backward that computes
        # uses a core.
        waiting = in_distributed or (in_autograd and not thread.is_busy())
        if not waiting:
            self._history.seen_at(place)
        own, quick, doing = self._history.typical()
        state = f"{place} step {self.steps} {waiting}"
        if state != self._last_state:
            self._last_state = state
            self._since = now
        trains = self.steps > 0
        return Location(
            step=self.steps,
            activity="train" if trains else "startup",
            phase=place,
            since=self._since,
            is_waiting=waiting and now - self._since > LOCATED_SECONDS,
            has_trained=trains,
            has_step_limit=trains,
            # A script's evaluation or save looks like a hang. Unless a limit is set, only a collective must
            # be short.
            has_idle_limit=trains and (waiting or self._has_hang_timeout),
            # A copy, because the training thread appends to the deque meanwhile.
            typical_step=median(tuple(self._times) or (0.0,)),
            longest_step=self._longest,
            own=own,
            quick=quick,
            doing=doing,
        )

    def beat(self, _sent: Heartbeat) -> None:
        """Report the new steps every few seconds."""
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self._send_progress()

    def _send_progress(self) -> None:
        """Report the new steps; only rank 0 reports numbers of the run."""
        if self._is_silent:
            return
        with self._lock:
            times = self._unsent
            self._unsent = []
            new = self.steps - self._steps_sent
            self._steps_sent = self.steps
            self._sent_at = time.monotonic()
        if not new or self._position.rank != 0:
            return
        self._send_samples(
            metrics.GLOBAL_STEP.set(self.steps),
            metrics.STEPS.inc(new),
            metrics.LAST_STEP_TIMESTAMP_SECONDS.set(time.time()),
        )
        for start in range(0, len(times), MAX_TIMES):
            self._send_samples(metrics.STEP_DURATION_SECONDS.observe(*times[start : start + MAX_TIMES]))

    def _send_samples(self, *samples: Sample) -> None:
        self._send(Samples(list(samples)))


def where(frame: FrameType | None) -> tuple[str, bool, bool]:
    """Return ("train.py:42", in a collective, in autograd) for a thread's innermost frame.

    The place is the innermost line of a file that does not belong to an installed package, or else the
    innermost line. Generated code ("<string>", a dataclass's methods) is not a file.
    """
    innermost = frame
    location = ""
    in_autograd = False
    while frame is not None:
        file = frame.f_code.co_filename
        in_autograd = in_autograd or "/torch/autograd/" in file
        if not location and is_own(file):
            location = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    if not location and innermost is not None:
        location = f"{os.path.basename(innermost.f_code.co_filename)}:{innermost.f_lineno}"
    return location, in_collective(innermost), in_autograd
