"""How a process of ours is started (prctl(2)), where it finds modules, and what the kernel says of one."""

import ctypes
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def name_process(name: str) -> None:
    """What `ps` and `pkill` know this process by, in 15 characters; exec takes the name away."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def end_with_parent(number: int) -> None:
    """Get this signal when the parent dies, however it dies; exec keeps that."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def stat_of(pid: int) -> list[str]:
    """What proc(5) says of a process after its name: its state, its parent, ...; nothing where it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


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
