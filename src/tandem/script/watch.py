"""What a program that knows nothing of tandem shows of itself: steps, pace, and where it stands.

torch's global hook counts optimizer steps; a thread beside the program sends heartbeats four times a second.
Where a rank is, its stack says: the innermost line of the program's own, and whether that waits for others.
"""

import json
import os
import sys
import sysconfig
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from tandem.distributed.position import Position
from tandem.log import renew_outputs
from tandem.script.job import Job
from tandem.script.pace import Pace
from tandem.telemetry import metrics
from tandem.telemetry.families import Sample
from tandem.telemetry.messages import Heartbeat, Samples, Send
from tandem.timeouts import (
    BEAT_SECONDS,
    PROGRESS_SECONDS,
    SHORTEST_HANG_SECONDS,
    STARTING_HANG_SECONDS,
)

RECENT_STEPS, STEPS_PER_HANG, BUSY_SHARE = 50, 5, 0.5
MAX_TIMES = 1000  # of steps, in a message of 64 KiB
INSTALLED = ("/site-packages/", "/dist-packages/", sysconfig.get_path("stdlib") + "/", "<frozen ")
OURS = str(Path(__file__).parent.parent) + "/"


class Watch:
    """One rank's steps and signs of life, from construction on."""

    def __init__(self, job: Job, position: Position, send: Send) -> None:
        self._job, self._position, self._send = job, position, send
        self._main = threading.main_thread().ident or 0
        self._modules = set(sys.modules)
        self._counts: Counter[int] = Counter()  # by optimizer
        self._hook: Any = None
        self._is_silent = False
        self._lock = threading.Lock()
        self.steps, self._steps_sent, self._sent_at = 0, 0, 0.0
        self._ended_at, self._times, self._unsent = 0.0, [0.0] * RECENT_STEPS, list[float]()
        self._place, self._since = "", time.monotonic()
        self._pace = Pace()
        self._cpu: list[tuple[float, float]] = [(time.monotonic(), time.process_time())]
        if position.rank == 0:
            self._say(
                metrics.WORLD_SIZE.set(position.world_size),
                metrics.NODES.set(position.nodes),
                metrics.GLOBAL_STEP.set(0),
            )
        self._count_steps()
        threading.Thread(target=self._beat, name="tandem-heartbeat", daemon=True).start()

    def hand_over(self) -> None:
        """The program says by itself where it is: nothing more from here."""
        self._count_steps()
        self._tell_steps()
        self._is_silent = True

    def close(self) -> None:
        """Say the last steps."""
        self._tell_steps()

    def imported(self) -> list[str]:
        """Installed modules that the program has brought in, in the order of their import."""
        new = [(name, module) for name, module in list(sys.modules.items()) if name not in self._modules]
        files = ((name, getattr(module, "__file__", None) or "") for name, module in new)
        return [name for name, file in files if any(place in file for place in INSTALLED)]

    def _count_steps(self) -> None:
        """Hook into torch as soon as the program, or the fork server before it, has imported it."""
        register = getattr(
            sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None
        )
        if self._hook is None and register is not None:
            self._hook = register(self._after_step)

    def _after_step(self, optimizer: object, _args: object, _kwargs: object) -> None:
        """An optimizer has stepped. With several (a GAN), a step is one of the one that steps most."""
        if self._is_silent and self.steps:
            return
        self._counts[id(optimizer)] += 1
        if self._counts[id(optimizer)] <= self.steps:
            return
        now = time.perf_counter()
        with self._lock:
            if self.steps:  # what lies before the first end is the start
                self._times[self.steps % RECENT_STEPS] = now - self._ended_at
                self._unsent.append(now - self._ended_at)
            self.steps, self._ended_at = self.steps + 1, now
        if not self._is_silent:
            self._pace.stepped(optimizer)
        if self.steps == 1 and self._position.local_rank == 0:
            self._learn()

    def _learn(self) -> None:
        """What the program imports, for the processes that stand by for the next generation."""
        path = imports_file(self._position)
        with suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(self.imported()))
            path.with_suffix(".new").replace(path)

    def _beat(self) -> None:
        while not self._is_silent:
            with suppress(Exception):  # a rank that nobody speaks for is taken for one that hangs
                self._speak()
            time.sleep(BEAT_SECONDS)

    def _speak(self) -> None:
        self._count_steps()
        self._cpu = [*self._cpu[-4:], (time.monotonic(), time.process_time())]
        self._send(self._heartbeat())
        renew_outputs()
        if time.monotonic() - self._sent_at >= PROGRESS_SECONDS:
            self._tell_steps()

    def _heartbeat(self) -> Heartbeat:
        place, in_distributed, in_autograd = where(sys._current_frames().get(self._main))
        waiting = in_distributed or (in_autograd and not self._busy())
        if not waiting:
            self._pace.seen_at(place)
        own, quick, doing = self._pace.typical()
        now, state = time.monotonic(), f"{place} step {self.steps} {waiting}"
        if state != self._place:
            self._place, self._since = state, now
        hang = self._hang_seconds()
        # A program's evaluation or save looks like a hang: by itself only a collective has to be short.
        short = self.steps > 0 and (waiting or self._job.hang_timeout is not None)
        return Heartbeat(
            rank=self._position.rank,
            step=self.steps,
            activity="train" if self.steps else "startup",
            phase=place,
            quiet=round(now - self._since, 3),
            limit=hang if short else max(hang, self._job.patience),
            hang=hang,
            trained=self.steps > 0,
            waiting=waiting and now - self._since > 2 * BEAT_SECONDS,
            own=own,
            quick=quick,
            doing=doing,
        )

    def _hang_seconds(self) -> float:
        if self._job.hang_timeout is not None:
            return self._job.hang_timeout
        if not self.steps:
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * max(self._times))

    def _busy(self) -> bool:
        (then, cpu_then), (now, cpu_now) = self._cpu[0], self._cpu[-1]
        return now > then and (cpu_now - cpu_then) / (now - then) > BUSY_SHARE

    def _tell_steps(self) -> None:
        """The new steps; numbers of the run are rank 0's."""
        if self._is_silent:
            return
        with self._lock:
            times, self._unsent = self._unsent, []
            new, self._steps_sent = self.steps - self._steps_sent, self.steps
            self._sent_at = time.monotonic()
        if not new or self._position.rank != 0:
            return
        self._say(
            metrics.GLOBAL_STEP.set(self.steps),
            metrics.STEPS.inc(new),
            metrics.LAST_STEP_TIMESTAMP_SECONDS.set(time.time()),
        )
        for start in range(0, len(times), MAX_TIMES):
            self._say(metrics.STEP_DURATION_SECONDS.observe(*times[start : start + MAX_TIMES]))

    def _say(self, *samples: Sample) -> None:
        self._send(Samples(list(samples)))


def imports_file(position: Position) -> Path:
    """Where a node's ranks leave what they have imported."""
    return Path(position.sample_socket or ".").parent / "imports.json"


def where(frame: FrameType | None) -> tuple[str, bool, bool]:
    """("train.py:42", in a collective, in autograd) of a thread's innermost frame.

    The place is the innermost line of a file that belongs to no installed package, else the innermost
    line of all. Code that was made as it ran ("<string>", a dataclass's methods) is no file.
    """
    innermost, place, in_distributed, in_autograd = frame, "", False, False
    while frame is not None:
        file = frame.f_code.co_filename
        in_distributed = in_distributed or "/torch/distributed/" in file
        in_autograd = in_autograd or "/torch/autograd/" in file
        if not place and not file.startswith((OURS, "<")) and not any(each in file for each in INSTALLED):
            place = f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    if not place and innermost is not None:
        place = f"{os.path.basename(innermost.f_code.co_filename)}:{innermost.f_lineno}"
    return place, in_distributed, in_autograd
