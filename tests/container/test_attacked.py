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
from tandem.cluster import chaos, job_secret
from tandem.cluster.engine import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.faults, pytest.mark.timeout(900)]
STEPS = "--steps 300 --log-every 5 --checkpoint-every 30 --eval-every 1000 --hang-timeout 60 --threads 1"
MESSAGES = 1000

# In a node's container: what listens beyond loopback there, "tcp|udp PORT NAME-OF-ITS-PROCESS".
LISTENING = """
import os, pathlib
names = {}
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        for link in (process / "fd").iterdir():
            names[os.readlink(link)] = (process / "comm").read_text().strip()
    except OSError:
        pass
loopback = "7F", "00000000000000000000000001000000"
for kind, listens in (("tcp", "0A"), ("tcp6", "0A"), ("udp", "07"), ("udp6", "07")):
    for line in pathlib.Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
        words = line.split()
        host, port = words[1].split(":")
        if words[3] == listens and not host.endswith(loopback):
            print(kind.rstrip("6"), int(port, 16), names.get(f"socket:[{words[9]}]", "nobody's"))
"""

# What a stranger may say, in turn, to each HOST:KIND:PORT; the first word is how many messages each.
ENEMY = """
import itertools, os, pickle, secrets, socket, sys, time
from contextlib import suppress
from datetime import timedelta
from tandem.launch import guard

class Planted:
    def __reduce__(self):
        return os.system, ("touch /checkpoints/was-here /tmp/was-here /run/tandem/was-here",)

bits = pickle.dumps(Planted())
STORE = b"\\x3c\\x85\\xf7\\xce"
key = b"tandem/rendezvous"
text = len(key).to_bytes(8, "little") + key
SAID = [
    b"",  # half open
    secrets.token_bytes(3000),
    STORE + bytes(300),
    STORE + b"\\0" + text + len(bits).to_bytes(8, "little") + bits,  # set
    b"\\x06" + text,  # delete
    b"\\x16\\x03\\x01\\x02\\0\\x01" + bytes(200),
    bits,
    b"GET /../../../etc/passwd HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n",
    b"POST /metrics HTTP/1.1\\r\\nContent-Length: 99999999999\\r\\n\\r\\n" + bits,
    b"GET / HTTP/1.1\\r\\n" + b"X: y\\r\\n" * 5000,
    b"\\xff" * 65000,
]

def store(address):
    from torch.distributed import TCPStore
    there = TCPStore(*address, is_master=False, timeout=timedelta(seconds=2), wait_for_workers=False)
    for name in ("tandem/rendezvous", "torch.rendezvous.tandem"):
        there.set(name, bits)
    for name in there.list_keys():
        if "/pulse/" in name or "metrics/" in name:
            there.set(name, bits)

held, sent = [], 0
secret, stores = sys.argv[2] == "secret", [place for place in sys.argv[3:] if place.endswith(":29500")]
for turn in itertools.count():
    for place in sys.argv[3:]:
        host, kind, port = place.split(":")
        sent, address = sent + 1, (host, int(port))
        with suppress(OSError, RuntimeError, ValueError):
            if kind == "udp":
                with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
                    stranger.sendto(SAID[turn % len(SAID)][:60000], address)
            elif place in stores and not secret and turn % 3 == 0:
                store(address)
            else:
                stranger = socket.create_connection(address, timeout=2)
                held.append(stranger)
                if secret and turn % 12 == 11 and place in stores:
                    guard.ask(stranger, b"x" * 32, turn % 65536)
                else:
                    stranger.sendall(SAID[turn % len(SAID)])
        while len(held) > 200:
            held.pop(0).close()
    if turn + 1 == int(sys.argv[1]):
        break
print("sent", sent, flush=True)
"""


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
        job_secret.remove(self.project)


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.soak), False], ids=["with a secret", "without one"]
)
def job(request: pytest.FixtureRequest, image: str, tmp_path: Path) -> Iterator[Job]:
    tmp_path.chmod(0o755)
    (tmp_path / "small.py").write_text(TASK)
    own = Job(tmp_path, "")
    if request.param:
        own.secret = str(job_secret.make(own.project, {}))
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


LEFT = """
import pathlib
print([str(path) for place in ("*/", "run/tandem/") for path in pathlib.Path("/").glob(place + "was-here")])
"""


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
