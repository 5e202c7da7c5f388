"""Find all processes of a launch that a benchmark started, by a mark in their environment.

Ranks lead their own sessions, and daemons have lost their parent, so only an environment variable finds all.
"""

import os
import subprocess
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

MARK = "STARTED_BY_BENCHMARK"


class Marked(NamedTuple):
    pid: int
    name: str
    session: int


def marked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` with a mark by which a program's processes can be found.

    The program may write bytecode, because installed packages have it. Otherwise every process of a fresh
    clone would compile tandem again, and a launch would take a fifth longer.
    """
    kept = {name: value for name, value in environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, MARK: uuid.uuid4().hex}


def started(
    command: Sequence[str], environ: Mapping[str, str], output: Path, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a program as the leader of its own session; append its output to `output`."""
    with output.open("ab") as file:
        return subprocess.Popen(
            command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def living(environ: Mapping[str, str]) -> list[Marked]:
    """Return the living processes that were started with this environment."""
    found, line = [], f"{MARK}={environ[MARK]}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if line in (entry / "environ").read_bytes().split(b"\0"):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    name, pid = (entry / "comm").read_text().strip(), int(entry.name)
                    found.append(Marked(pid, name, os.getsid(pid)))
        except OSError:
            continue
    return found
