"""Print the log of a job and exit with its code: `follow_job.py PROJECT NODES RUN_DIR`.

Runs in a container next to the nodes (job.yaml). Each node writes its exit code to the volume `notes`; a
node without one was killed.
"""

import contextlib
import json
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tandem.errors import KILLED, MISCONFIGURED, is_own, job_code
from tandem.platforms.compose import NOTES


class Waits(NamedTuple):
    """Seconds: between two polls, until all nodes are up, and until a node that is gone has exited."""

    poll: float = 0.5
    start: float = 30.0
    gone: float = 20.0  # longer than a restart of a node by Docker
    stopped: float = 2.0  # the same, if Docker does not restart nodes


WAITS = Waits()


class Log:
    """Output that the nodes and rank 0 write to their log files from now on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = {path: path.stat().st_size for path in self._files()}

    def _files(self) -> list[Path]:
        return sorted([*self._folder.glob("node-*.log"), *self._folder.glob("rank-0.log")])

    def show(self) -> None:
        for path in self._files():
            with contextlib.suppress(OSError), path.open("rb") as file:
                begin = self._read.get(path, 0)
                if begin > path.stat().st_size:  # it was rotated
                    begin = 0
                file.seek(begin)
                text = file.read()
                whole = text[: text.rfind(b"\n") + 1]
                self._read[path] = begin + len(whole)
                sys.stdout.buffer.write(whole)
                sys.stdout.buffer.flush()


class Nodes:
    """The containers of the service `node`: their names, and the exit codes that they have written."""

    def __init__(self, project: str, count: int) -> None:
        self.project, self.count = project, count
        for path in NOTES.glob("code-*.json"):  # from an earlier job
            path.unlink(missing_ok=True)

    def found(self) -> list[int]:
        """Return the numbers, from 1, of containers whose names resolve; a few more for a wrong --scale."""
        return [index for index in range(1, self.count + 4) if self._is_known(index)]

    def _is_known(self, index: int) -> bool:
        with contextlib.suppress(OSError):
            socket.gethostbyname(f"{self.project}-node-{index}")
            return True
        return False

    def codes(self) -> list[int]:
        """Return the exit codes of the nodes that have exited by themselves."""
        found = []
        for path in NOTES.glob("code-*.json"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                found.append(int(json.loads(path.read_text())["exit_code"]))
        return found

    def have_ended(self) -> bool:
        """Return True if no node is running and none will be restarted."""
        codes = self.codes()
        return len(codes) >= self.count and all(code == 0 or is_own(code) for code in codes)


class ScaledError(Exception):
    """The containers do not match NODES; the argument is their numbers."""


def wait_for(nodes: Nodes, log: Log, waits: Waits) -> None:
    """Wait until all nodes are up or have exited. Raises ScaledError if some are missing."""
    deadline = time.monotonic() + waits.start
    while len(found := nodes.found()) + len(nodes.codes()) < nodes.count:
        if time.monotonic() > deadline:
            raise ScaledError(found)
        time.sleep(waits.poll)
        log.show()


def follow(nodes: Nodes, log: Log, stopping: list[int], waits: Waits) -> int:
    """Show the log until the job has ended and return its exit code. Raises ScaledError."""
    seen_at = time.monotonic()
    while not nodes.have_ended():
        log.show()
        time.sleep(waits.poll)
        running, codes = nodes.found(), nodes.codes()
        if len(codes) > nodes.count:
            raise ScaledError([*range(1, len(codes) + 1)])
        if running and running[-1] > nodes.count:
            raise ScaledError(running)
        if running:
            seen_at = time.monotonic()
        elif time.monotonic() - seen_at > (waits.stopped if stopping else waits.gone):
            break
    log.show()
    codes = nodes.codes()
    codes += [KILLED] * (nodes.count - len(codes))
    code = job_code(codes)
    print(f"job ended with {code} (nodes: {', '.join(map(str, sorted(codes)))})", flush=True)
    return code


def main(project: str, count: str, run_dir: str, waits: Waits = WAITS) -> int:
    """Return the job's exit code, or 2 if --scale has changed the number of nodes."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    nodes, log = Nodes(project, int(count)), Log(Path(run_dir, "log"))
    try:
        wait_for(nodes, log, waits)
        return follow(nodes, log, stopping, waits)
    except ScaledError as error:
        print(
            f"--scale, or an earlier NODES: the containers of the service node are {error}, expected 1 to "
            f"{count} (NODES); type: docker compose down, then NODES={count} docker compose up",
            flush=True,
        )
        return MISCONFIGURED


if __name__ == "__main__":
    project, nodes, run_dir = sys.argv[1:]
    sys.exit(main(project, nodes, run_dir))
