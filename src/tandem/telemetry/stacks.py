"""Read the stacks of a rank's threads, without a signal that its program may use.

Ranks write them to their log directory when their agent reports a hang, and `thread_stacks` returns them for
`tandem stacks`. A rank that no longer runs Python, because C code holds the interpreter's lock, gets a signal
instead, whose handler is in C. Other ranks do not get the signal, because the program may have installed its
own handler in Python.
"""

import faulthandler
import logging
import re
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import IO, Any

from tandem import layout
from tandem.rotation import LOG_BYTES, rotate

log = logging.getLogger("tandem.run")

LAST_RESORT = signal.SIGRTMAX - 7
"""No other known program uses it; glibc reserves the first two real-time signals."""
MOST_FRAMES = 200
"""Frames of a thread that are reported, from the innermost on; a recursion may have thousands."""
STARTED_BY_TANDEM = ("/tandem/launch/workers.py", "/tandem/script/execute.py")
"""Files whose frames call the program; they and the frames further out are the same in every rank."""
_file: IO[str] | None = None

Frame = tuple[str, int, str]
"""File, line and function."""


def stacks_file(directory: Path, rank: int) -> Path:
    return directory / layout.stacks(rank)


def keep_stacks(directory: Path, rank: int) -> None:
    """Open the file for this rank's stacks in advance, because its volume may hang when they are needed."""
    global _file
    path = stacks_file(directory, rank)
    try:
        rotate(path, LOG_BYTES)
        _file = path.open("a")
    except OSError as error:  # training does not depend on it
        log.debug("no stacks will be written: %s", error)
        return
    faulthandler.register(LAST_RESORT, file=_file, all_threads=True)


def write_stacks() -> None:
    if _file is not None:
        faulthandler.dump_traceback(file=_file, all_threads=True)


def thread_stacks() -> list[dict[str, Any]]:
    """Return the stacks of this process's threads except the caller's, the main thread's first.

    A row has `thread` (its name) and `frames`, the innermost first. Source lines are not read, because the
    volume they are on may hang.
    """
    names = {each.ident: each.name for each in threading.enumerate()}
    main = threading.main_thread().ident
    found = sys._current_frames()
    rows = []
    for ident in sorted(found, key=lambda each: each != main):
        if ident != threading.get_ident():
            rows.append({"thread": names.get(ident, f"thread {ident}"), "frames": _frames(found[ident])})
    return rows


def _frames(frame: FrameType | None) -> list[Frame]:
    frames: list[Frame] = []
    while frame is not None and len(frames) < MOST_FRAMES:
        code = frame.f_code
        if frames and code.co_filename.endswith(STARTED_BY_TANDEM):
            break
        frames.append((code.co_filename, frame.f_lineno or 0, code.co_qualname))
        frame = frame.f_back
    return frames


_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')


def parse_dump(text: str) -> list[dict[str, Any]]:
    """Return the last dump in `text`, which faulthandler wrote, as `thread_stacks` does.

    faulthandler writes the newest thread first, so the main thread is the last one.
    """
    rows: list[dict[str, Any]] = []
    for line in text.splitlines():
        if match := _THREAD.match(line):
            rows.append({"thread": match[2] or f"thread 0x{match[1]}", "frames": []})
        elif rows and (match := _FRAME.match(line)):
            frames = rows[-1]["frames"]
            is_ours = frames and match[1].endswith(STARTED_BY_TANDEM)
            # Frames further out than the program's own are tandem's.
            rows[-1]["ended"] = rows[-1].get("ended", False) or is_ours
            if not rows[-1]["ended"]:
                frames.append((match[1], int(match[2]), match[3]))
    if rows:
        rows.insert(0, {**rows.pop(), "thread": "MainThread"})
    return [{"thread": row["thread"], "frames": row["frames"]} for row in rows]


def is_helper(row: Mapping[str, Any]) -> bool:
    """Return True for a thread that tandem itself has started in a rank."""
    return str(row["thread"]).startswith(("tandem-", "agent-lifeline"))
