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
    """One launch, leader of a session of its own, `inside` a network namespace if one is named, with more
    `variables`.

    `close` ends that session and the launcher's children, nothing else.
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
        """The lines of events.jsonl of that kind so far."""
        return [event for event in self.lines("events.jsonl") if event.get("kind") == kind]

    def lines(self, name: str) -> list[dict[str, Any]]:
        """The lines of a journal so far; {} for one that is being written."""
        try:
            lines = (self.run_dir / name).read_text().splitlines()
        except FileNotFoundError:
            return []
        return [_parsed(line) for line in lines]

    def until(self, condition: Callable[[], bool], what: str, limit: float = LIMIT_SECONDS) -> None:
        """Raises RuntimeError with the run's last words when `limit` seconds pass, or the run ends."""
        deadline = time.monotonic() + limit
        while not condition():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"no {what}; the run's last words:\n{self.words()}")
            time.sleep(0.002)

    def words(self, last: int | None = 2000) -> str:
        """The last characters of what it has said."""
        text = self.output.read_text(errors="replace")
        return text if last is None else text[-last:]

    def summary(self) -> dict[str, Any]:
        return dict(json.loads((self.run_dir / "summary.json").read_text()))

    def wait(self, limit: float = LIMIT_SECONDS) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        return self.process.wait(limit)

    def ranks(self) -> dict[int, int]:
        """{rank: pid} of this launch."""
        return {
            int(name.removeprefix("tandem-rank-")): pid
            for pid, name in session_of(self.process.pid)
            if name.startswith("tandem-rank-")
        }

    def workers(self) -> list[int]:
        """The worker processes of a torchrun launch: its children."""
        try:
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except FileNotFoundError:
            return []
        return [int(pid) for pid in children.split()]

    def agents(self) -> dict[int, int]:
        """{node: pid} of the nodes' agents."""
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
    """The living processes (pid, name) of a run, also those that lead sessions of their own."""
    return [(each.pid, each.name) for each in living(_environs[leader])]


def tree_of(root: int) -> list[int]:
    """A process and all below it, whichever sessions they are in."""
    parents = {}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError, IndexError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root]
    for each in found:
        found += [pid for pid, parent in parents.items() if parent == each]
    return found


def memory_of(pid: int, *kinds: str) -> int:
    """Bytes of a process's memory, shared pages by their share (PSS), all or of these kinds such as
    "Pss_Anon"; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    wanted = kinds or ("Pss",)
    return sum(1024 * int(line.split()[1]) for line in lines if line.partition(":")[0] in wanted)
