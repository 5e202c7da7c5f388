"""A stranger's container on the network of two nodes: hostile messages at every port that tandem opens."""

import shutil
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from clusters import IMAGE, docker
from test_cluster import TASK, at_full_pace

from patience import patient
from program_files import program_text
from tandem.cluster import actions, chaos
from tandem.cluster.engine import Cluster

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]
STEPS = "--steps 300 --log-every 5 --checkpoint-every 30 --eval-every 1000 --hang-timeout 60 --threads 1"
MESSAGES = 1000

# In a node's container: what listens beyond loopback there, "tcp|udp PORT NAME-OF-ITS-PROCESS".
LISTENING = program_text("attacked_listening")

# What a stranger may say, in turn, to each HOST:KIND:PORT; the first word is how many messages each.
ENEMY = program_text("attacked_enemy")


class Job:
    """A project in which a calm run is followed by one that is attacked."""

    def __init__(self, tasks: Path, secret: str) -> None:
        self.project, self.tasks, self.secret = f"tandem-test-{uuid.uuid4().hex[:8]}", tasks, secret

    def cluster(self, run: str, pause: float) -> Cluster:
        command = f"launch {STEPS} --metrics-linger 0 --task.pause {pause}"
        own = {"TASKS": str(self.tasks), "TANDEM_TASK": "/tasks/small.py:Small", "COMMAND": command}
        return Cluster(
            self.project, {**chaos.OWN_RUN, **own, "IMAGE": IMAGE, "RUN": run, "SECRET_FILE": self.secret}
        )

    def remove(self) -> None:
        self.cluster("end", 0).compose("down", "--volumes", "--remove-orphans")
        actions.remove_secret(self.project)


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.soak), False], ids=["with a secret", "without one"]
)
def job(request: pytest.FixtureRequest, image: str, tmp_path: Path) -> Iterator[Job]:
    tmp_path.chmod(0o755)
    (tmp_path / "small.py").write_text(TASK)
    own = Job(tmp_path, "")
    if request.param:
        own.secret = str(actions.make_secret(own.project, {}))
    yield own
    own.remove()
    shutil.rmtree(tmp_path, ignore_errors=True)


def until_it_trains(cluster: Cluster) -> None:
    deadline = time.monotonic() + patient(200)
    while not cluster.read(f"{cluster.run_dir}/metrics.jsonl"):
        assert time.monotonic() < deadline, "no step"
        time.sleep(1)


def listening(cluster: Cluster) -> dict[str, str]:
    """{HOST:KIND:PORT: name of its process} of both nodes."""
    found = {}
    for node in cluster.nodes():
        for line in cluster.inside(node, LISTENING).splitlines():
            kind, port, name = line.split()
            found[f"{node.name}:{kind}:{port}"] = name
    return found


def attack(cluster: Cluster, places: list[str], secret: bool) -> str:
    """1,000 messages to each of these ports, in turn, from a container that has nothing but the network."""
    own = ["--rm", "--network", f"{cluster.project}_default", "--read-only", "--cap-drop", "ALL"]
    said = [ENEMY, str(MESSAGES), "secret" if secret else "none", *places]
    return docker("run", *own, "--entrypoint", "python3", IMAGE, "-c", *said, seconds=500)


LEFT = program_text("attacked_left")


def test_hostile_messages_run_nothing_and_change_no_weight(job: Job) -> None:
    calm = job.cluster("calm", 0)
    chaos.start(calm)
    undisturbed = chaos.finish(calm)
    broken = job.cluster("broken", 1.5)  # held back until `at_full_pace`
    chaos.start(broken)
    until_it_trains(broken)
    there = listening(broken)
    ranks = [place for place, name in there.items() if name.startswith("tandem-rank")]
    assert len(ranks) == 2 and len(there) == 4, f"the store or its gate, the page, gloo's: {there}"
    said = attack(broken, list(there), bool(job.secret))
    assert int(said.split()[-1]) == 4 * MESSAGES, said
    for node in broken.nodes():
        assert broken.inside(node, LEFT).strip() == "[]"
    at_full_pace(f"{job.tasks}/small.py:Small")
    assert chaos.finish(broken) == undisturbed
    worlds = [event for event in broken.events() if event["kind"] == "world"]
    assert len(worlds) == 1, "no rank was started again"
