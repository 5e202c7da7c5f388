"""What the container tests share: the engine's command line, and clusters that can be disturbed."""

import functools
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from patience import patient
from tandem.cluster import actions
from tandem.cluster.engine import Cluster

ROOT = Path(__file__).parents[2]
IMAGE = os.environ.get("IMAGE") or "tandem:cuda"
CLUSTER = [sys.executable, "-m", "tandem.cluster"]


def docker(*arguments: str, check: bool = True, seconds: float = 100) -> str:
    """Output of a docker command, which has to work unless told otherwise."""
    ended = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=patient(seconds))
    assert not check or ended.returncode == 0, ended.stderr
    return ended.stdout


@functools.cache
def missing() -> str:
    """What these tests lack here, and how to get it; empty when it is all there."""
    for what, command in (
        ("no engine answers; type: sudo make docker-host", ["docker", "info"]),
        ("no compose plugin; type: sudo make docker-host", ["docker", "compose", "version"]),
        (f"no image {IMAGE}; type: make image", ["docker", "image", "inspect", IMAGE]),
    ):
        try:
            ended = subprocess.run(command, capture_output=True, timeout=patient(60))
        except OSError:
            return what
        if ended.returncode:
            return what
    return ""


class TestedCluster:
    """One project of a test's own: `up` and the other verbs as a person types them."""

    __test__ = False

    def __init__(self, project: str, port: int, processes: Any) -> None:
        self.project, self.port, self.processes = project, port, processes
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        self.environment = {**clean, "TANDEM_METRICS_LINGER": "0", "MEMORY": "1536mb"}

    def start(self, *flags: str, **environ: str) -> Any:
        """`cluster.py up` in the background."""
        command = [*CLUSTER, "up", "--project", self.project, "--image", IMAGE]
        command += ["--metrics-port", str(self.port), *flags]
        return self.processes.start(command, cwd=ROOT, env={**self.environment, **environ})

    def up(self, *flags: str, limit: float = 250, **environ: str) -> tuple[int, str]:
        """`cluster.py up` to its end: code and output."""
        code, output = self.processes.wait(self.start(*flags, **environ), limit)
        return code, output

    def call(self, verb: str, *flags: str) -> tuple[int, str]:
        """Another verb, to its end."""
        command = [*CLUSTER, verb, "--project", self.project, *flags]
        code, output = self.processes.run(command, 200, cwd=ROOT, env=self.environment)
        return code, output

    def engine(self, run: str = "digits") -> Cluster:
        """The cluster as compose/'s own code sees it."""
        return Cluster(self.project, {"IMAGE": IMAGE, "RUN": run})

    def page(self, path: str = "/metrics") -> str:
        """What the metrics port of this host serves; empty while nobody answers."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def step(self) -> int:
        """The global step on the metrics page."""
        lines = self.page().splitlines()
        steps = [line.split()[1] for line in lines if line.startswith("tandem_global_step ")]
        return int(float(steps[0])) if steps else 0

    def until(self, condition: Callable[[], bool], process: Any, what: str, limit: float = 240) -> None:
        """Poll while `up` runs; the test fails when it ends first, or the time is over."""
        deadline = time.monotonic() + patient(limit)
        while not condition():
            assert process.poll() is None, f"ended before {what}:\n{process.stdout.read()}"
            assert time.monotonic() < deadline, f"no {what} within {limit:g} s"
            time.sleep(0.2)

    def left(self) -> dict[str, list[str]]:
        """Containers, networks and volumes of the project."""
        mine = ("--filter", f"label=com.docker.compose.project={self.project}")
        return {
            "containers": docker("ps", "-aq", *mine).split(),
            "networks": docker("network", "ls", "-q", *mine).split(),
            "volumes": docker("volume", "ls", "-q", *mine).split(),
        }

    def remove(self) -> None:
        """Everything, volumes too."""
        replace(self.engine(), watched=True).compose("down", "--volumes", "--remove-orphans")
        actions.remove_secret(self.project)
