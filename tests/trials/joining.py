"""Eight nodes in network namespaces on one machine, some of them with a planted fault, run the node check.

Needs root, `tc` with tbf, and the kernel's CPU limits. All links have LINK_RATE, because real ones have a
limit, too.
"""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from networks import Machine, machines
from patience import patient

ROOT = Path(__file__).parents[2]
PORT = 29500
NODES = 8
LINK_RATE = "1gbit"
TENTH_RATE = "100mbit"
BURST = "burst 128kb latency 50ms"
CLOCK_SECONDS = "60"
REASONS = {"bandwidth": "link", "core": "speed", "volume": "run volume", "clock": "clock"}
"""Which check must fail for each planted fault."""
CPU_GROUPS = Path("/sys/fs/cgroup")
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'
IN_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Checked(NamedTuple):
    """The verdict that all nodes printed, and the exit code of each."""

    verdict: dict[str, Any]
    codes: list[int]

    def named(self) -> dict[int, list[str]]:
        """{node: names of the failed checks}."""
        nodes = self.verdict["nodes"]
        return {
            each["node"]: [check["name"] for check in each["checks"]]
            for each in nodes
            if each["state"] != "pass"
        }


class TenthOfACore:
    """A control group that limits what is in it to a tenth of a core, from `begin` on; versions 1 and 2."""

    def __init__(self) -> None:
        self._is_first_version = (CPU_GROUPS / "cpu").is_dir()
        parent = CPU_GROUPS / "cpu" if self._is_first_version else CPU_GROUPS
        if not self._is_first_version:
            (parent / "cgroup.subtree_control").write_text("+cpu")
        self.folder = parent / f"tandem-join-{os.getpid()}"
        self.folder.mkdir()

    def begin(self) -> None:
        if self._is_first_version:
            (self.folder / "cpu.cfs_quota_us").write_text("10000")
        else:
            (self.folder / "cpu.max").write_text("10000 100000")

    def close(self) -> None:
        deadline = time.monotonic() + patient(10)
        while self.folder.exists() and time.monotonic() < deadline:
            with suppress(OSError):
                self.folder.rmdir()
            time.sleep(0.05)


class JoiningNodes:
    """The namespaces, on one bridge.

    Half of the nodes are spares, so that the check succeeds on healthy nodes although some stay out.
    """

    def __init__(self, fabric: Sequence[Machine], folder: Path) -> None:
        self._machines = fabric
        self._folder = folder

    def check(self, faults: Mapping[str, int]) -> Checked:
        """Run the check on all nodes; `faults` has the node of each planted fault."""
        count = len(self._machines)
        for number, each in enumerate(self._machines):
            rate = TENTH_RATE if number == faults.get("bandwidth") else LINK_RATE
            each.run(f"tc qdisc replace dev eth0 root tbf rate {rate} {BURST}")
        with closing(TenthOfACore()) as core:
            # A node with a tenth of a core would import torch for half a minute, so the limit begins when it
            # waits for node 0.
            if faults.get("core") == 0:
                core.begin()
            started = {node: self._start(node, faults, core) for node in range(1, count)}
            try:
                for process in started.values():
                    _await_line(process, "waiting for master")
                core.begin()
                started[0] = self._start(0, faults, core)
                ended = [started[node].communicate(timeout=patient(150)) for node in range(count)]
            finally:
                for process in started.values():
                    process.kill()
                    process.wait()
        codes = [int(started[node].returncode) for node in range(count)]
        told = [json.loads(output) if output else {"said": error} for output, error in ended]
        assert all(each == told[0] for each in told), told
        return Checked(told[0], codes)

    def _start(self, node: int, faults: Mapping[str, int], core: TenthOfACore) -> subprocess.Popen[str]:
        module = "shifted_clock" if node == faults.get("clock") else "tandem"
        count = len(self._machines)
        job = ("--nodes", count // 2, "--spares", count - count // 2, "--node-rank", node)
        where = ("--master", f"{self._machines[0].address}:{PORT}", "--run-dir", self._folder)
        command = [sys.executable, "-m", module, "doctor", "--join", "--json", *map(str, (*job, *where))]
        if node == faults.get("volume"):
            command = ["unshare", "--mount", "sh", "-c", READ_ONLY, str(self._folder), *command]
        if node == faults.get("core"):
            command = ["sh", "-c", IN_GROUP, str(core.folder), *command]
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "benchmarks")))
        return subprocess.Popen(
            [*self._machines[node].on, *command],
            env={**clean, "PYTHONPATH": path, "CLOCK_SECONDS": CLOCK_SECONDS, "GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


def _await_line(process: subprocess.Popen[str], text: str) -> None:
    assert process.stderr is not None
    seen = []
    for line in process.stderr:
        seen.append(line)
        if text in line:
            return
    raise AssertionError("".join(seen))


@contextmanager
def joining_nodes(folder: Path, count: int = NODES) -> Iterator[JoiningNodes]:
    """Create `count` namespaces; the run directory is in `folder`."""
    run_dir = folder / "run"
    run_dir.mkdir()
    found = machines(count)
    try:
        yield JoiningNodes(next(found), run_dir)
    finally:
        next(found, None)


def drawn_faults() -> dict[str, int]:
    """Draw four different nodes, one for each fault."""
    return dict(zip(REASONS, random.sample(range(NODES), len(REASONS)), strict=True))
