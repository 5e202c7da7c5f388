"""`tandem kill`: a signal to one rank or node of one run on this machine, and to nothing else.

A name such as tandem-rank-1 is also that of another run's rank, and the beginning of tandem-rank-10. What
only one process tree has is this run's RUN/log/rank-1.log, open for writing: its topmost process is meant.
No link counts: neither one in the run that leads to another's logs, nor one in another run that leads here.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from tandem import layout
from tandem.errors import ConfigError
from tandem.process import stat_of
from tandem.run.directory import RunDir

WRITES = os.O_WRONLY | os.O_RDWR


def kill(run: RunDir, kind: str, number: int, name: str) -> str:
    """Send SIG`name` to rank or node (`kind`) `number` of a run; a line about it. Raises ConfigError."""
    run_dir = run.folder
    if run.logs.is_symlink():
        raise ConfigError(f"{run_dir}/log is a link to another run's logs; give that run's directory")
    if not run.logs.is_dir():
        what = "has not started" if (run_dir / layout.OWNER).is_dir() else "is not a run"
        raise ConfigError(f"{run_dir} {what}: it has no log directory; give the directory of a running run")
    found = processes_of(run)
    pid = found.get((kind, number))
    if pid is None:
        here = ", ".join(str(other) for other_kind, other in sorted(found) if other_kind == kind)
        raise ConfigError(
            f"{run_dir} has no {kind} {number} on this machine; {kind}s running here: {here or 'none'}"
        )
    try:
        os.kill(pid, getattr(signal, f"SIG{name}"))
    except ProcessLookupError:
        return f"{kind} {number} of {run_dir} (process {pid}) has just ended"
    except PermissionError as error:
        raise ConfigError(f"{kind} {number} of {run_dir} (process {pid}) belongs to another user") from error
    return f"{kind} {number} of {run_dir} (process {pid}): SIG{name}"


def processes_of(run: RunDir) -> dict[tuple[str, int], int]:
    """{("rank", 1): pid, ("node", 0): pid, ...}: who writes the logs of a run on this machine."""
    folder = os.path.realpath(run.logs)
    writers: dict[tuple[str, int], set[int]] = {}
    others: set[int] = set()
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        for path in _written_by(pid):
            place, name = os.path.split(path)
            if (match := layout.PROCESS_LOG.fullmatch(name)) is None:
                continue
            if place == folder:
                writers.setdefault((match[1], int(match[2])), set()).add(pid)
            elif os.path.basename(place) == layout.LOG:
                others.add(pid)
    agents = {pid for (kind, _), pids in writers.items() if kind == "node" for pid in pids}
    own = {who: {pid for pid in pids if _is_own(pid, agents, others)} for who, pids in writers.items()}
    return {who: _topmost(pids, f"tandem-{who[0]}-{who[1]}") for who, pids in own.items() if pids}


def _is_own(pid: int, agents: set[int], others: set[int]) -> bool:
    """False for a process of another run, one of whose logs is a link to here: its agent has a log there."""
    while pid > 1 and pid not in agents:
        if pid in others:
            return False
        pid = _parent(pid)
    return True


def _written_by(pid: int) -> Iterator[str]:
    """Files that a process has open for writing; none of one that has ended or is another user's."""
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            flags = re.search(r"^flags:\s*(\d+)$", Path(f"/proc/{pid}/fdinfo/{number}").read_text(), re.M)
            if flags and int(flags[1], 8) & WRITES:
                yield os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return


def _topmost(pids: set[int], name: str) -> int:
    """The one whose parent is not among them: the others are its children, who inherit what is open.

    Where a person's program writes there, too, it is the one that is called `name`.
    """
    tops = [pid for pid in pids if _parent(pid) not in pids] or list(pids)
    return min(tops, key=lambda pid: (_name(pid) != name[:15], pid))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0
