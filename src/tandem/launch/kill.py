"""`tandem kill`: a signal to one rank or node of one run on this machine, and to nothing else.

A name such as tandem-rank-1 is also that of another run's rank, and the beginning of tandem-rank-10. What
only one process tree has is this run's RUN/log/rank-1.log, open for writing: its topmost process is meant.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from tandem.checkpoint.owner import FOLDER
from tandem.errors import ConfigError
from tandem.process import stat_of

LOG = re.compile(r"(rank|node)-(\d+)\.log")
WRITES = os.O_WRONLY | os.O_RDWR


def kill(run_dir: Path, kind: str, number: int, name: str) -> str:
    """Send SIG`name` to rank or node (`kind`) `number` of a run; a line about it. Raises ConfigError."""
    if not (run_dir / "log").is_dir():
        what = "has not begun" if (run_dir / FOLDER).is_dir() else "is no run"
        raise ConfigError(f"{run_dir} {what}: it has no log folder; give the directory of a run that trains")
    found = processes_of(run_dir)
    pid = found.get((kind, number))
    if pid is None:
        here = ", ".join(str(other) for other_kind, other in sorted(found) if other_kind == kind)
        raise ConfigError(
            f"{run_dir} has no {kind} {number} on this machine; {kind}s that run here: {here or 'none'}"
        )
    try:
        os.kill(pid, getattr(signal, f"SIG{name}"))
    except ProcessLookupError:
        return f"{kind} {number} of {run_dir} (process {pid}) has just ended"
    except PermissionError as error:
        raise ConfigError(f"{kind} {number} of {run_dir} is process {pid} of another user") from error
    return f"{kind} {number} of {run_dir} (process {pid}): SIG{name}"


def processes_of(run_dir: Path) -> dict[tuple[str, int], int]:
    """{("rank", 1): pid, ("node", 0): pid, ...}: who writes the logs of a run on this machine."""
    folder = os.path.realpath(run_dir / "log")
    writers: dict[tuple[str, int], set[int]] = {}
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        for path in _written_by(pid):
            match = LOG.fullmatch(os.path.basename(path))
            if match and os.path.dirname(path) == folder:
                writers.setdefault((match[1], int(match[2])), set()).add(pid)
    return {who: _topmost(pids) for who, pids in writers.items()}


def _written_by(pid: int) -> Iterator[str]:
    """Files that a process has open for writing; none of one that has ended or is another user's."""
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            flags = re.search(r"^flags:\s*(\d+)$", Path(f"/proc/{pid}/fdinfo/{number}").read_text(), re.M)
            if flags and int(flags[1], 8) & WRITES:
                yield os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return


def _topmost(pids: set[int]) -> int:
    """The one whose parent is not among them: the others are its children, who inherit what is open."""
    return min((pid for pid in pids if _parent(pid) not in pids), default=min(pids))


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0
