"""Runs that a benchmark starts, watches through their events, and injects faults into."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from marked import living, marked, started

HERE = Path(__file__).parent
TASK = HERE / "small_task.py"
LIMIT_SECONDS = 120.0


class LiveRun:
    """One launch, the leader of its own session, optionally `inside` a network namespace.

    `variables` are added to its environment. `close` ends only that session and the launcher's children.
    """

    def __init__(
        self,
        launcher: Sequence[str],
        run_dir: Path,
        *flags: object,
        inside: str | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.run_dir = run_dir
        command = [
            *(("ip", "netns", "exec", inside) if inside else ()),
            *(sys.executable, "-m", *launcher, "--task", f"{TASK}:Small", "--run-dir", str(run_dir)),
            *("--batch-size", "240", "--metrics-linger", "0", "--metrics", "0", "--eval-every", "never"),
            *map(str, flags),
        ]
        run_dir.mkdir(parents=True, exist_ok=True)
        self.output = run_dir / "output.txt"
        environment = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # without it torchrun's restarts often hang
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(":")
        environment = marked(environment | dict(variables or {}))
        self.process = started(command, environment, self.output)
        _environs[self.process.pid] = environment

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of events.jsonl of this kind so far."""
        return [event for event in self.lines("events.jsonl") if event.get("kind") == kind]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a journal so far; {} for an incomplete one."""
        try:
            lines = (self.run_dir / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [_parsed(line) for line in lines]

    def until(self, condition: Callable[[], bool], what: str, limit: float = LIMIT_SECONDS) -> None:
        """Wait for the condition. Raises RuntimeError with the run's last output after `limit` or its end."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"no {what}; the run's last words:\n{self.words()}")
            time.sleep(0.002)

    def words(self, last: int | None = 2000) -> str:
        """Return the end of the output."""
        text = self.output.read_text(errors="replace")
        return text if last is None else text[-last:]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def wait(self, limit: float = LIMIT_SECONDS) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(limit)

    def ranks(self) -> dict[int, int]:
        """Return {rank: pid} of this launch."""
        return {
            int(name.removeprefix("tandem-rank-")): pid
            for pid, name in session_of(self.process.pid)
            if name.startswith("tandem-rank-")
        }

    def workers(self) -> list[int]:
        """Return the worker processes of a torchrun launch: its children."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return [int(pid) for pid in children.split()]

    def agents(self) -> dict[int, int]:
        """Return {node: pid} of the nodes' agents."""
        return {
            int(name.removeprefix("tandem-node-")): pid
            for pid, name in session_of(self.process.pid)
            if name.startswith("tandem-node-")
        }

    def close(self) -> None:
        workers = self.workers()  # torchrun gives each a session of its own
        for kill, pid in ((os.killpg, self.process.pid), *((os.kill, pid) for pid in workers)):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "LiveRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _parsed(line: str) -> dict[str, Any]:
    try:
        return dict(json.loads(line))
    except ValueError:  # being written
        return {}


_environs: dict[int, Mapping[str, str]] = {}


def session_of(leader: int) -> list[tuple[int, str]]:
    """Return the living processes (pid, name) of a run, also those in their own sessions."""
    return [(each.pid, each.name) for each in living(_environs[leader])]


def tree_of(root: int) -> list[int]:
    """Return a process and all its descendants, in any session."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def memory_of(pid: int, *kinds: str) -> int:
    """Return the bytes of a process's memory, with its part of shared pages (PSS).

    `kinds`, such as "Pss_Anon", select a part of it. 0 if the process has ended.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    wanted = kinds or ("Pss",)
    return sum(1024 * int(line.split()[1]) for line in lines if line.partition(":")[0] in wanted)
