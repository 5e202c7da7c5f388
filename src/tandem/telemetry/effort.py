"""Whether the training thread works or stands still, and whether it waits for other ranks there.

Known from outside of it, four times a second: by its stack, by the CPU time of it and of this process, and by
that of processes below this one, such as loaders. A thread that sleeps, waits for a lock or for a network
shows none of these; only time tells then what it is.
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

from tandem import running
from tandem.process import stat_of
from tandem.timeouts import BEAT_SECONDS

LOOKS = 9  # the last two seconds
BUSY_SHARE = 0.5  # of a core, by this process over the last second
WORKING_SHARE = (
    0.03  # of a core, by the training thread; one that looks every 10 ms whether to go on takes 0.3%
)
OTHERS_SHARE = 0.1  # of a core, by other threads here: some of them always look at something
CHANGES = 3  # of its stack within LOOKS; one that sleeps between looks is hardly ever seen elsewhere
DEPTH = 64  # innermost frames that are compared
BELOW_SECONDS = 2.0  # between two looks at processes below, while nothing else shows work
MOST_BELOW = 256


@dataclass(frozen=True)
class _Look:
    at: float
    thread: float
    process: float
    stack: int


class Effort:
    """The training thread of this process, the main one, as `look` sees it, which is called at each beat.

    `worked_at`: when work was last seen (`running.now`).
    """

    def __init__(self) -> None:
        self._thread = threading.main_thread().ident or 0
        self._clock = time.pthread_getcpuclockid(self._thread)
        self._looks: deque[_Look] = deque([self._seen()], LOOKS)
        self._below = (self._looks[0].at, 0.0)
        self.worked_at = self._looks[0].at

    def look(self, by_cpu_time: bool = True) -> None:
        """See what it does now. CPU time of its own says nothing where it may wait for a GPU, in a loop."""
        before, seen = self._looks[-1], self._seen()
        self._looks.append(seen)
        stacks = [each.stack for each in self._looks]
        seconds = max(seen.at - before.at, BEAT_SECONDS / 2)
        if (
            (by_cpu_time and seen.thread - before.thread > WORKING_SHARE * seconds)
            or (by_cpu_time and seen.process - before.process > OTHERS_SHARE * seconds)
            or sum(one != other for one, other in zip(stacks, stacks[1:], strict=False)) >= CHANGES
            or self._is_worked_for(seen.at)
        ):
            self.worked_at = seen.at

    @property
    def frame(self) -> FrameType | None:
        """Where it stands."""
        return sys._current_frames().get(self._thread)

    def is_busy(self) -> bool:
        """Whether this process has used a good part of a core in the last second."""
        first, last = self._looks[max(0, len(self._looks) - 5)], self._looks[-1]
        return last.at > first.at and (last.process - first.process) / (last.at - first.at) > BUSY_SHARE

    def _seen(self) -> _Look:
        return _Look(running.now(), time.clock_gettime(self._clock), time.process_time(), _state(self.frame))

    def _is_worked_for(self, now: float) -> bool:
        """Whether processes below this one have used CPU time since the last look at them."""
        then, used = self._below
        if now - then < BELOW_SECONDS:
            return False
        self._below = now, cpu_seconds_below(os.getpid())
        return self._below[1] - used > WORKING_SHARE * (now - then)


def in_collective(frame: FrameType | None) -> bool:
    """Whether a thread that stands there is in a collective: torch called it, and no other code since.

    A wrapped model's own code has torch.distributed further out in its stack, and does not wait in it.
    """
    if frame is not None and frame.f_code.co_filename.endswith("/torch/nn/parallel/distributed.py"):
        return True  # DDP exchanges buffers
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        if "/torch/distributed/" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def cpu_seconds_below(pid: int) -> float:
    """CPU time of all processes below one, as far as proc(5) says, with those that have ended."""
    ticks, to_see = sum(map(int, stat_of(pid)[13:15])), [pid]
    for each in to_see:  # grows
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError, ValueError):
                to_see += [int(child) for child in children.read_text().split()][: MOST_BELOW - len(to_see)]
        if each != pid:
            ticks += sum(map(int, stat_of(each)[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _state(frame: FrameType | None) -> int:
    """A number for where each of the innermost frames stands."""
    places = list[tuple[int, int]]()
    while frame is not None and len(places) < DEPTH:
        places.append((id(frame.f_code), frame.f_lasti))
        frame = frame.f_back
    return hash(tuple(places))
