"""Use kernel services for processes: prctl(2), /proc, control groups; control Python's search path."""

import ctypes
import fcntl
import gc
import os
import resource
import signal
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tandem.timeouts import END_LOOK_SECONDS

PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
PR_SET_CHILD_SUBREAPER = 36
ENDED = ("Z", "X", "x")
MOST_OPEN_FILES = 65_536
"""Enough for batches of thousands of tensors. It is no more, because some programs close all possible files
one by one."""


def name_process(name: str) -> None:
    """Set the name that `ps` and `pkill` show for this process, up to 15 characters; exec resets it."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection during large imports; later collections skip the objects created there.

    `import torch` creates hundreds of thousands of objects, none of which is garbage. Collections would take
    a fifth of the import's time. In processes forked from this one, a collection would also write to shared
    pages, and so copy them.
    """
    is_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_enabled:
            gc.enable()


def allow_open_files() -> int:
    """Raise this process's limit of open files up to MOST_OPEN_FILES, if its hard limit allows it; return it.

    Processes that it starts inherit the limit. Many shells set 1,024, and a loader process sends each large
    tensor of a batch as an open file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


def open_files(pid: int) -> int:
    """Return the number of files that a process has open; 0 if it is gone or belongs to another user."""
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0


def end_with_parent(number: int) -> None:
    """Make the kernel send this process a signal when its parent dies, however it dies.

    The setting survives exec (PR_SET_PDEATHSIG). The parent is the thread that started this process.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, instead of init.

    This is PR_SET_CHILD_SUBREAPER of prctl(2).
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Process(NamedTuple):
    """A live process, as in proc(5). `state` is one letter; T means stopped."""

    pid: int
    name: str
    state: str
    parent: int
    session: int

    def __str__(self) -> str:
        return f"{self.name} (process {self.pid})"


def living() -> dict[int, Process]:
    """Return all processes of this machine or container that have not ended."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{entry}/stat", "rb") as file:
                    # The last bracket, because a process may have one in its name.
                    head, _, rest = file.read().rpartition(b")")
                state, parent, _, session = rest[:64].split()[:4]
                name = head.partition(b"(")[2].decode(errors="replace")
                each = Process(int(entry), name, state.decode(), int(parent), int(session))
                # After its first thread has ended, a process shows the state of an ended one while other
                # threads live.
                if each.state not in ENDED or int(rest.split()[17]) > 1:
                    found[each.pid] = each
    return found


def below(
    pid: int, without: Collection[int] = (), among: Mapping[int, Process] | None = None
) -> list[Process]:
    """Return the descendants of a process, parents before children.

    Leaves out the processes in `without` and their descendants.
    """
    children: dict[int, list[Process]] = {}
    for each in (living() if among is None else among).values():
        if each.pid not in without:
            children.setdefault(each.parent, []).append(each)
    found = list(children.get(pid, ()))
    for each in found:  # the list grows while it is iterated over
        found += children.get(each.pid, ())
    return found


def send(number: int, to: Iterable[Process | int]) -> None:
    """Send a signal to processes; skip those that are gone or belong to another user."""
    for each in to:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each if isinstance(each, int) else each.pid, number)


def end_below(pid: int, limit_seconds: float) -> list[Process]:
    """Kill all descendants of a process until none is left; return those alive after `limit_seconds`."""
    deadline = time.monotonic() + limit_seconds
    while (left := below(pid)) and time.monotonic() < deadline:
        send(signal.SIGKILL, left)
        time.sleep(END_LOOK_SECONDS)
    return left


def stat_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name (state, parent, ...); [] if there is no process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def is_alive(pid: int) -> bool:
    return stat_of(pid)[:1] not in ([], *([state] for state in ENDED))


def boot_id() -> str:
    """Return the kernel's ID of this boot, which no other machine or boot has; "" if it cannot be read."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def control_groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield (directory, version) of this process's control groups for `controller`, and of their parents.

    `root` is the directory that contains proc and sys.
    """
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            # The line of version 2 names no controllers.
            if controllers and controller not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / (controllers and controller)
            path = PurePosixPath(name.lstrip("/"))
            # The limit of each group above counts as well.
            for each in (path, *path.parents) if name != "/" else (path,):
                yield mount / each, 1 if controllers else 2


MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    2: ("memory.max", "memory.current", ("inactive_file", "active_file")),
}
"""{control group version: files with the limit and the usage, and the page cache's part of it}."""


def nearest_existing(folder: Path) -> Path:
    """Return `folder`, or its nearest parent that exists. Raises OSError if one may not be searched."""
    absolute = folder.absolute()
    return next(each for each in (absolute, *absolute.parents) if each.exists())


def memory_left(root: Path) -> int | None:
    """Return the bytes of memory that the machine and this process's control groups have left.

    Returns None if that is unknown.

    Beyond a group's limit, the kernel kills one of its processes without an error to any other.
    """
    left: list[int] = []
    with suppress(OSError, ValueError, KeyError):
        left.append(1024 * _numbers_in(root / "proc/meminfo")["MemAvailable:"])
    for folder, version in control_groups(root, "memory"):
        limit, used, cached = MEMORY_FILES[version]
        with suppress(
            OSError, ValueError, KeyError
        ):  # "max" is no limit; a machine's outermost group has no such files
            stat = _numbers_in(folder / "memory.stat")
            free = int((folder / limit).read_text()) - int((folder / used).read_text())
            # The kernel frees the page cache before it kills a process.
            left.append(max(0, free + sum(stat[name] for name in cached)))
    return min(left, default=None)


def _numbers_in(path: Path) -> dict[str, int]:
    """Parse lines of "name number", with or without a unit."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1}


DEVICE_FILES = ("/dev/nvidia", "/dev/infiniband/")


def close_device_files() -> None:
    """Close a GPU's device files in a process that was forked from one with a GPU and does not use it.

    The driver frees the memory of a killed process only when the last descriptor is closed, including these.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith(DEVICE_FILES):
                os.close(int(name))


class ReadFile(NamedTuple):
    """A file that this process has open for reading. `flags` are those of open(2)."""

    descriptor: int
    flags: int
    offset: int


def files_read_here() -> list[ReadFile]:
    """Return the regular files that this process has open only for reading, for `reopen` after a fork."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own descriptor is closed by now
            flags = fcntl.fcntl(int(name), fcntl.F_GETFL)
            is_read = flags & (os.O_ACCMODE | os.O_PATH) == os.O_RDONLY
            if is_read and stat.S_ISREG(os.fstat(int(name)).st_mode):
                found.append(ReadFile(int(name), flags, os.lseek(int(name), 0, os.SEEK_CUR)))
    return found


def reopen(files: Iterable[ReadFile]) -> None:
    """Give this forked process its own position in `files`, which the process that forked it has listed.

    A fork copies descriptors but not positions: of two processes that seek and read, each would read what the
    other has sought.
    """
    for each in files:
        # Opening fails if this user may no longer read the file; its position then stays shared.
        with suppress(OSError):
            # Through /proc, because the file may have been renamed or deleted.
            again = os.open(f"/proc/self/fd/{each.descriptor}", each.flags)
            os.lseek(again, each.offset, os.SEEK_SET)
            os.dup2(again, each.descriptor, inheritable=os.get_inheritable(each.descriptor))
            os.close(again)


SAFE_PATH = "PYTHONSAFEPATH"
OURS = "tandem"
_is_ours = False


def safe_path(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` for an interpreter that does not import modules from the current directory.

    Otherwise, a random.py, queue.py or torch.py in the directory where a command is typed would be imported.
    The value records that tandem set it, so that `undo_safe_path` can undo it for users' programs, which must
    behave as under python.
    """
    return {**environ, SAFE_PATH: environ.get(SAFE_PATH) or OURS}


def undo_safe_path(environ: MutableMapping[str, str]) -> None:
    """Remove tandem's request for a safe path, before this process runs or starts other programs."""
    global _is_ours
    if environ.get(SAFE_PATH) == OURS:
        del environ[SAFE_PATH]
        _is_ours = True


def is_safe_path_ours() -> bool:
    """Return whether Python's safe path is on only because tandem requested it."""
    return _is_ours
