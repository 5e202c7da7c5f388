"""Every fault of the table, one after the other in one cluster: each has its documented outcome, and the run
that went through them all ends with the weights of an undisturbed one.
"""

import shutil
import subprocess
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from clusters import IMAGE, ROOT

from patience import patient
from program_files import program_text
from tandem.cluster import chaos
from tandem.cluster.engine import Cluster
from tandem.cluster.faults import FAULTS

pytestmark = [pytest.mark.timeout(600), pytest.mark.faults]

STEPS = "--steps 1000 --checkpoint-every 5 --eval-every 1000"
COMMAND = f"launch {STEPS} --max-restarts 20 --threads 1 --hang-timeout 10 --metrics-linger 0"
SAME_RANKS = {"pause", "slow-node", "disk-full"}  # all others open a new world
# The digits with a pause in every step for as long as a fault is still to come: seven minutes of steps, since
# a busy machine has to be through with the faults before the run ends.
TASK = program_text("chaos_task")


@dataclass(frozen=True)
class Scenes:
    """One project for the calm run and the broken one, so that the digits are drawn once."""

    project: str
    tasks: Path

    def cluster(self, run: str) -> Cluster:
        own = {**chaos.OWN_RUN, "TASKS": str(self.tasks), "TANDEM_TASK": "/tasks/task.py:WhileBroken"}
        return Cluster(self.project, {**own, "COMMAND": COMMAND, "IMAGE": IMAGE, "RUN": run})


@pytest.fixture(scope="module")
def scenes(image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    tasks = tmp_path_factory.mktemp("tasks")
    tasks.chmod(0o755)
    (tasks / "task.py").write_text(TASK)
    own = Scenes(f"tandem-test-{uuid.uuid4().hex[:8]}", tasks)
    yield own
    own.cluster("end").compose("down", "--volumes", "--remove-orphans")
    shutil.rmtree(tasks)


@pytest.fixture(scope="module")
def calm(scenes: Scenes) -> str:
    """The weights of an undisturbed run."""
    cluster = scenes.cluster("calm")
    chaos.start(cluster)
    return chaos.finish(cluster)


@pytest.fixture(scope="module")
def broken(scenes: Scenes, calm: str) -> Cluster:
    """The cluster that goes through all faults."""
    (scenes.tasks / "slowly").touch()
    cluster = scenes.cluster("broken")
    chaos.start(cluster)
    return cluster


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_outcome(broken: Cluster, name: str) -> None:
    before = len(broken.events())
    row = chaos.inject_fault(broken, name, 1)
    assert str(row).startswith(f"{name}: ") and "\n" not in str(row)
    since = {event["kind"] for event in broken.events()[before:]}
    assert ("resumed" not in since) == (name in SAME_RANKS)


def test_all_of_them_cost_no_bit(scenes: Scenes, calm: str, broken: Cluster) -> None:
    (scenes.tasks / "slowly").unlink()
    assert chaos.finish(broken) == calm


@pytest.mark.parametrize(("words", "line"), [
    (["FAULT=melt"], "FAULT: invalid value 'melt'; expected all or one of kill-rank, "),
    (["FAULT=kill-rank", "NODE=x"], "NODE: invalid value 'x'; expected an integer >= 0"),
    (["FAULT=kill-rank", "PROJECT=nobody"], "there is no cluster nobody here; start one: make compose-up"),
])  # fmt: skip
def test_what_cannot_be_broken(image: str, words: list[str], line: str) -> None:
    command = ["make", "--no-print-directory", "chaos", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patient(60))
    assert ended.returncode == 2 and ended.stderr.startswith(f"tandem: {line}")
