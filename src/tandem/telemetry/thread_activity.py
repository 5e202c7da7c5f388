"""Detect whether the training thread works or is blocked, and whether it waits for other ranks.

Another thread observes it four times a second: its stack, its CPU time and that of this process, and the CPU
time of child processes such as loaders. A thread that sleeps or waits for a lock or the network shows none of
these; only the time limit then decides. See docs/architecture.md#hangs.
"""

import os
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tandem import running_clock
from tandem.process import stat_of
from tandem.timeouts import BEAT_SECONDS

LOOKS = 9  # covers the last two seconds
BUSY_SHARE = 0.5  # of a core, by this process over the last second
WORKING_SHARE = 0.03  # of a core, by the training thread; one that polls every 10 ms takes 0.3%
OTHERS_SHARE = 0.1  # of a core, by other threads of the process, some of which always poll something
CHANGES = 3  # of its stack within LOOKS; a thread that sleeps between polls is rarely found elsewhere
DEPTH = 64  # how many innermost frames are compared
BELOW_SECONDS = 2.0  # between two checks of child processes, while nothing else shows work
MOST_BELOW = 256  # processes; a script may have thousands, and each costs some reads


@dataclass(frozen=True)
class _Look:
    at: float
    thread: float
    process: float
    stack: int


class ThreadActivity:
    """The activity of this process's main thread, which trains; call `look` at each heartbeat.

    `worked_at`: when work was last seen (`running_clock.now`).
    """

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._looks: deque[_Look] = deque([self._seen()], LOOKS)
        self._below = (self._looks[0].at, 0.0)
        self.worked_at = self._looks[0].at

    def look(self, by_cpu_time: bool = True) -> None:
        """Observe the thread.

        `by_cpu_time` is False if it may wait for a GPU in a loop that uses CPU time.
        """
        before = self._looks[-1]
        seen = self._seen()
        self._looks.append(seen)
        stacks = [each.stack for each in self._looks]
        # Soon after the last check, even a little CPU time would be a large share.
        seconds = max(seen.at - before.at, BEAT_SECONDS / 2)
        if (
            (by_cpu_time and seen.thread - before.thread > WORKING_SHARE * seconds)
            or (by_cpu_time and seen.process - before.process > OTHERS_SHARE * seconds)
            or sum(one != other for one, other in zip(stacks, stacks[1:], strict=False)) >= CHANGES
            # The last condition, because it reads /proc for each child process.
            or self._children_used_cpu(seen.at)
        ):
            self.worked_at = seen.at

    @property
    def frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread)

    def is_busy(self) -> bool:
        """Return True if this process used a large part of a core in the last second."""
        first = self._looks[max(0, len(self._looks) - 5)]
        last = self._looks[-1]
        return last.at > first.at and (last.process - first.process) / (last.at - first.at) > BUSY_SHARE

    def _seen(self) -> _Look:
        return _Look(
            running_clock.now(), time.clock_gettime(self._clock), time.process_time(), _state(self.frame)
        )

    def _children_used_cpu(self, now: float) -> bool:
        """Return True if child processes have used CPU time since they were last checked."""
        then, used = self._below
        if now - then < BELOW_SECONDS:
            return False
        self._below = now, cpu_seconds_below(os.getpid())
        return self._below[1] - used > WORKING_SHARE * (now - then)


def in_collective(frame: FrameType | None) -> bool:
    """Return True if a thread at this frame waits in a collective.

    Only the innermost frames count: the code of a wrapped model also has torch.distributed in its stack,
    further out, but does not wait there.
    """
    if frame is not None and frame.f_code.co_filename.endswith(
        # DDP exchanges buffers, or a collective waits in C++.
        ("/torch/nn/parallel/distributed.py", "/tandem/telemetry/collective_waits.py")
    ):
        return True
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def cpu_seconds_below(pid: int) -> float:
    """Return the CPU time of all descendants of a process, including ended ones (proc(5))."""
    # cutime and cstime: the children that have ended. The process's own time does not matter here.
    ticks = sum(map(int, stat_of(pid)[13:15]))
    to_see = [pid]
    for each in to_see:  # grows during the loop
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError, ValueError):
                to_see += [int(child) for child in children.read_text().split()][: MOST_BELOW - len(to_see)]
        if each != pid:
            ticks += sum(map(int, stat_of(each)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _state(frame: FrameType | None) -> int:
    """Return a number for the positions of the innermost frames."""
    frames = list[tuple[int, int]]()
    while frame is not None and len(frames) < DEPTH:
        frames.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(frames))
