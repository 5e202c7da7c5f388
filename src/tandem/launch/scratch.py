"""A folder for the sockets of one agent, gone with it; what killed agents have left is swept by the next."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch() -> Iterator[Path]:
    """A new folder of this process, removed at the end.

    Its name says whose it is: the process, and the PID namespace that this number counts in, because
    containers may share a temporary directory.
    """
    prefix = f"tandem-{os.stat('/proc/self/ns/pid').st_ino}-"
    for old in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's stays
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
