"""How a process of ours is started (prctl(2)), where it finds modules, what the kernel says of processes."""

import ctypes
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tandem.timeouts import END_LOOK_SECONDS

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
ENDED = ("Z", "X", "x")


def name_process(name: str) -> None:
    """What `ps` and `pkill` know this process by, in 15 characters; exec takes the name away."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Get this signal when the parent dies, however it dies; exec keeps that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent, in place of init, of every process below this one whose own parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(NamedTuple):
    """A process that lives, as proc(5) has it. `state`: one letter; T is stopped."""

    pid: int
    name: str
    state: str
    parent: int
    session: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def living() -> dict[int, Process]:
    """All processes of this machine, or container, that have not ended."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    head, _, rest = file.read().rpartition(b")")
                state, parent, _, session = rest[:64].split()[:4]
                name = head.partition(b"(")[2].decode(errors="replace")
                each = Process(int(entry), name, state.decode(), int(parent), int(session))
                # One whose first thread has ended has the state of an ended process while others live.
                if each.state not in ENDED or int(rest.split()[17]) > 1:
                    found[each.pid] = each
    return found


def below(
    pid: int, without: Collection[int] = (), among: Mapping[int, Process] | None = None
) -> list[Process]:
    """What lives below a process, parents before their children; `without` these and what is below them."""
    children: dict[int, list[Process]] = {}
    for each in (living() if among is None else among).values():
        if each.pid not in without:
            children.setdefault(each.parent, []).append(each)
    found = list(children.get(pid, ()))
    for each in found:  # which grows
        found += children.get(each.pid, ())
    return found


def send(number: int, to: Iterable[Process | int]) -> None:
    """Send a signal to processes; one that is gone, or is another user's, gets none."""
    for each in to:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each if isinstance(each, int) else each.pid, number)


def end_below(pid: int, limit_seconds: float) -> list[Process]:
    """Kill all that lives below a process, until nothing does; what still lives after `limit_seconds`."""
    deadline = time.monotonic() + limit_seconds
    while (left := below(pid)) and time.monotonic() < deadline:
        send(signal.SIGKILL, left)
        time.sleep(END_LOOK_SECONDS)
    return left


def stat_of(pid: int) -> list[str]:
    """What proc(5) says of a process after its name: its state, its parent, ...; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    return stat_of(pid)[:1] not in ([], *([state] for state in ENDED))


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """(folder, version) of this process's control groups for `controller`, and of all above them.

    `root` is where proc and sys are.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / (controllers and controller)
            path = PurePosixPath(name.lstrip("/"))
            for each in (path, *path.parents) if name != "/" else (path,):
                yield mount / each, 1 if controllers else 2


MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""By version of control groups: the limit, what is used, and what of that is the cache of files."""


def memory_left(root: Path) -> int | None:
    """Bytes that the machine and this process's control groups still have; None where nobody says.

    Beyond a group's limit the kernel kills a process of it, without an error to anybody.
    """
    left: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        left.append(1024 * _numbers_in(root / "proc/meminfo")["MemAvailable:"])
    for folder, version in control_groups(root, "memory"):
        limit, used, cached = MEMORY_FILES[version]
        with suppress(
            OSError, ValueError, KeyError
        ):  # "max": no limit; a machine's outermost group has no files
            stat = _numbers_in(folder / "memory.stat")
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            left.append(max(0, free + sum(stat[name] for name in cached)))
    return min(left, default=None)


def _numbers_in(path: Path) -> dict[str, int]:
    """Lines of "name number", perhaps with a unit."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


DEVICE_FILES = ("/dev/nvidia", "/dev/infiniband/")


def close_device_files() -> None:
    """In a process that was forked from one with a GPU and will not use it: close its device files.

    The driver frees what a killed process held when the last of them is closed, here as well.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder's own is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith(DEVICE_FILES):
                os.close(int(name))


SAFE_PATH, OURS = "PYTHONSAFEPATH", "tandem"
_is_ours = False


def safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for an interpreter that looks for no module in the current folder.

    A random.py, queue.py or torch.py that lies where somebody types the command would be run. The value says
    whose wish it is: people's own programs are to behave as python does, see `take_back_safe_path`.
    """
    return {**environ, SAFE_PATH: environ.get(SAFE_PATH) or OURS}


def take_back_safe_path(environ: MutableMapping[str, str]) -> None:
    """In a process started so, and before it runs or starts what is not ours: for that the wish is gone."""
    global _is_ours
    if environ.get(SAFE_PATH) == OURS:
        del environ[SAFE_PATH]
        _is_ours = True


def is_safe_path_ours() -> bool:
    """Whether python's safe path is on here because of us alone, and nobody else has asked for it."""
    return _is_ours
