"""Implement `tandem kill`: signal one rank or node of one run on this machine, and nothing else.

A process name is not enough: another run has a tandem-rank-1 too, and tandem-rank-1 is a prefix of
tandem-rank-10. The rank is therefore the topmost process that has RUN/log/rank-1.log open for writing. Links
do not count, neither from this run to another run's logs nor from another run to these.
"""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

from tandem import layout
from tandem.errors import ConfigError
from tandem.process import below, send, stat_of
from tandem.run.directory import RunDir

WRITES = os.O_WRONLY | os.O_RDWR
FREEZING = ("STOP", "CONT")
"""Signals that a node's ranks need, too. A killed agent takes its ranks with it; TERM lets it stop them."""


def kill(run: RunDir, kind: str, number: int, name: str) -> str:
    """Send SIG`name` to rank or node (`kind`) `number` of a run; return a line about it.

    Raises ConfigError if no such process runs on this machine.
    """
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
    freezes = kind == "node" and name in FREEZING
    other_nodes = {each for (which, _), each in found.items() if which == "node" and each != pid}
    ranks = below(pid, other_nodes) if freezes else []
    signal_number = getattr(signal, f"SIG{name}")
    try:
        os.kill(pid, signal_number)
    except ProcessLookupError:
        return f"{kind} {number} of {run_dir} (process {pid}) has just ended"
    except PermissionError as error:
        raise ConfigError(f"{kind} {number} of {run_dir} (process {pid}) belongs to another user") from error
    send(signal_number, ranks)
    more = f" and {len(ranks)} below it" if ranks else ""
    return f"{kind} {number} of {run_dir} (process {pid}{more}): SIG{name}"


def processes_of(run: RunDir) -> dict[tuple[str, int], int]:
    """Return {("rank", 1): pid, ("node", 0): pid, ...}: the local processes that write a run's logs."""
    folder = os.path.realpath(run.logs)
    writers: dict[tuple[str, int], set[int]] = {}
    others: set[int] = set()
    for pid in [int(each) for each in os.listdir("/proc") if each.isdigit()]:
        for path in _written_by(pid):
            parent, name = os.path.split(path)
            if (match := layout.PROCESS_LOG.fullmatch(name)) is None:
                continue
            # realpath() of this run's log directory, and the kernel's own path of the open file: links do not
            # count.
            if parent == folder:
                writers.setdefault((match[1], int(match[2])), set()).add(pid)
            elif os.path.basename(parent) == layout.LOG:
                others.add(pid)
    agents = {pid for (kind, _), pids in writers.items() if kind == "node" for pid in pids}
    own = {who: {pid for pid in pids if _is_own(pid, agents, others)} for who, pids in writers.items()}
    return {who: _topmost(pids, f"tandem-{who[0]}-{who[1]}") for who, pids in own.items() if pids}


def _is_own(pid: int, agents: set[int], others: set[int]) -> bool:
    """Return False for a process of another run whose log links to this run.

    Its agent writes a log of that run.
    """
    while pid > 1 and pid not in agents:
        if pid in others:
            return False
        pid = _parent(pid)
    return True


def _written_by(pid: int) -> Iterator[str]:
    """Yield the files that a process has open for writing; none if it is gone or another user's."""
    try:
        for number in os.listdir(f"/proc/{pid}/fd"):
            flags = re.search(r"^flags:\s*(\d+)$", Path(f"/proc/{pid}/fdinfo/{number}").read_text(), re.M)
            # `tail -f` has a log open for reading only. fdinfo has the flags in octal (proc(5)).
            if flags and int(flags[1], 8) & WRITES:
                yield os.readlink(f"/proc/{pid}/fd/{number}")
    except OSError:
        return


def _topmost(pids: set[int], name: str) -> int:
    """Return the process whose parent is not in `pids`.

    The others are its children, which inherit open files. If a user's program writes to the file as well, the
    process called `name` is preferred.
    """
    tops = [pid for pid in pids if _parent(pid) not in pids] or list(pids)
    # The kernel keeps 15 characters of a name (prctl(2)).
    return min(tops, key=lambda pid: (_name(pid) != name[:15], pid))


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").rstrip("\n")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    fields = stat_of(pid)
    return int(fields[1]) if fields else 0
