"""Read stacks with native frames from outside the process, with py-spy if it is installed.

py-spy stops a rank for about a second while it reads the stacks, because torch has many symbols.
"""

import json
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.timeouts import NATIVE_SECONDS

MISSING = "no native frames: py-spy is not installed on this node (pip install py-spy)"


class NativeStacks:
    """Runs py-spy on processes {rank: pid} of this node; `folder` is for its output."""

    def __init__(self, pids: dict[int, int], folder: Path) -> None:
        beside = str(Path(sys.executable).parent)  # a virtual environment need not be in PATH
        self._program = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
        self._folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._deadline = time.monotonic() + NATIVE_SECONDS
        for rank, pid in pids.items() if self._program else ():
            command = [str(self._program), "dump", "--native", "--json", "--pid", str(pid)]
            with self._output(rank).open("wb") as output, suppress(OSError):
                self._running[rank] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )

    def _output(self, rank: int) -> Path:
        return self._folder / f"native-{rank}"

    def is_done(self) -> bool:
        """Return True once every py-spy has ended; kill those that take too long."""
        if time.monotonic() > self._deadline:
            for process in self._running.values():
                process.kill()
        return all(process.poll() is not None for process in self._running.values())

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return what py-spy adds to a rank's answer: its threads, or why they are missing."""
        if not self._program:
            return {"note": MISSING}
        text = ""
        with suppress(OSError):
            text = self._output(rank).read_text(errors="replace")
            self._output(rank).unlink()
        try:
            return {"threads": _threads(json.loads(text))}
        except (ValueError, TypeError, KeyError):
            last = (text.strip().splitlines() or ["it wrote nothing"])[-1]
            return {"note": f"no native frames: py-spy: {last[:200]}"}


def _threads(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [
        {
            "thread": each["thread_name"] or f"thread {each['os_thread_id']}",
            "frames": [(frame["filename"], frame["line"], frame["name"]) for frame in each["frames"]],
        }
        for each in found
    ]
    return sorted(rows, key=lambda row: row["thread"] != "MainThread")
