"""`docker compose up` with the compose.yaml of the root, as someone types it in a fresh clone."""

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from clusters import ROOT, docker

from patience import patient

pytestmark = pytest.mark.timeout(600)
Up = Callable[..., Any]
CODE = ("--exit-code-from", "job")


class Project:
    """The root's compose.yaml under a name of the test's own."""

    def __init__(self, image: str, port: int, processes: Any) -> None:
        self.name, self.processes = f"tandem-up-{uuid.uuid4().hex[:8]}", processes
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        own = {"COMPOSE_PROJECT_NAME": self.name, "IMAGE": image, "METRICS_PORT": str(port)}
        self.environment = {**clean, **own, "MEMORY": "1536mb", "SETTINGS": "/dev/null"}

    def start(self, *flags: str, command: str = "launch --steps 20") -> Any:
        words = ["docker", "compose", "--ansi", "never", "up", "--no-build", *flags]
        return self.processes.start(words, cwd=ROOT, env={**self.environment, "COMMAND": command})

    def up(self, *flags: str, command: str = "launch --steps 20") -> tuple[int, str]:
        code, output = self.processes.wait(self.start(*flags, command=command), 250)
        return code, output

    def remove(self) -> None:
        words = ["docker", "compose", "down", "--volumes", "--remove-orphans"]
        subprocess.run(
            words, cwd=ROOT, env=self.environment, check=True, capture_output=True, timeout=patient(120)
        )


@pytest.fixture
def project(image: str, free_port: int, processes: Any) -> Iterator[Project]:
    own = Project(image, free_port, processes)
    yield own
    own.remove()


def test_it_trains_and_ends_by_itself(project: Project) -> None:
    code, output = project.up()
    assert code == 0 and "finished at step 20" in output and "job ended with 0 (nodes: 0, 0)" in output
    code, output = project.up(*CODE, command="launch --steps 25")
    assert code == 0 and "finished at step 25" in output, "it resumes, and the old log is not shown again"
    assert "finished at step 20" not in output


def test_the_code_is_the_jobs(project: Project) -> None:
    code, output = project.up(*CODE, command="launch --lr fast")
    assert code == 2 and "job ended with 2 (nodes: 2, 2)" in output


def test_a_killed_node_comes_back_and_ends_nothing(project: Project) -> None:
    process = project.start(*CODE, command="launch --epochs 3 --log-every 10")
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "step 50 of" in line:
            pid = docker("inspect", "--format", "{{.State.Pid}}", f"{project.name}-node-2")
            os.kill(int(pid), signal.SIGKILL)
            break
    assert seen and "step 50 of" in seen[-1], seen
    code, output = project.processes.wait(process, 250)
    assert code == 0 and "finished at step 750" in output, output
    assert docker("inspect", "--format", "{{.RestartCount}}", f"{project.name}-node-2").strip() == "1"


@pytest.mark.parametrize("nodes", [1, 3])
def test_scale_is_refused_with_one_line(project: Project, nodes: int) -> None:
    code, output = project.up(*CODE, "--scale", f"node={nodes}", command="launch --epochs 3")
    assert code == 2, output
    (line,) = [line for line in output.splitlines() if "--scale, or " in line]
    assert f"{nodes}], expected 1 to 2 (NODES)" in line and "docker compose down" in line
