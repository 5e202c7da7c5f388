"""A GPT whose tokens are in tar shards that a container of its own serves: killed, resumed, equal bits."""

import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest
from clusters import IMAGE, ROOT, TestedCluster, docker

from program_files import program_text
from shards import write_shard
from tandem.errors import KILLED

pytestmark = [pytest.mark.timeout(900), pytest.mark.faults]

SHARDS = 4
BATCH = 16
EPOCH = 200  # steps
CONTEXT = 64
SAMPLE_BYTES = 1024  # a header of tar, and 65 tokens as a file of NumPy
STEPS = 2 * EPOCH
FLAGS = (
    f"--steps {STEPS} --batch-size {BATCH} --log-every 5 --checkpoint-every 30 --optimizer adamw --lr 0.003 "
    "--threads 1 --task.pause 0.2"
)


def write_tokens(folder: Path) -> list[str]:
    """Write the project's own pages as shards of windows of characters; return the names of the shards."""
    text = "".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    tokens = numpy.frombuffer(text.encode("ascii", errors="replace"), dtype=numpy.uint8).astype("<u2")
    each = EPOCH * BATCH // SHARDS
    for shard in range(SHARDS):
        files = []
        for sample in range(shard * each, (shard + 1) * each):
            window = tokens[sample * CONTEXT :][: CONTEXT + 1]
            assert len(window) == CONTEXT + 1
            numpy.save(file := io.BytesIO(), window)
            files.append((f"{sample:06d}.npy", file.getvalue()))
        write_shard(folder / f"train-{shard}.tar", files)
    return [f"train-{shard}.tar" for shard in range(SHARDS)]


class Server:
    """A container that serves the shards, which no node can read in another way; it has only the network."""

    def __init__(self, name: str, shards: Path) -> None:
        self.name = name
        bare = ("--read-only", "--cap-drop", "ALL", "--hostname", "shards", "-v", f"{shards}:/shards:ro")
        program = (IMAGE, "-c", program_text("served_shards_server"), "/shards", "8000")
        docker("run", "-d", "--name", name, *bare, "--entrypoint", "python3", *program)

    def index(self, folder: Path, names: list[str]) -> None:
        """Let `tandem index` read the shards from this server, as a person does."""
        own = ("--network", f"container:{self.name}", "--user", f"{os.getuid()}:{os.getgid()}")
        written = ("--block-bytes", str(BATCH * SAMPLE_BYTES), "--output", "/index/index.jsonl")
        addresses = [f"http://shards:8000/{name}" for name in names]
        docker("run", "--rm", *own, "-v", f"{folder}:/index", IMAGE, "index", *addresses, *written)

    def join(self, network: str) -> None:
        docker("network", "connect", "--alias", "shards", network, self.name)

    def asked(self) -> list[tuple[str, str, str]]:
        """(who, file, range) of every request so far; to none it said no."""
        lines = [line.split() for line in docker("logs", self.name).splitlines()]
        assert {code for *_, code in lines} == {"206"}
        return [(who, name, span) for who, name, span, _ in lines]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of the task and its index; the containers' user may read it."""
    for each in (tmp_path, tmp_path / "task", tmp_path / "shards"):
        each.mkdir(exist_ok=True)
        each.chmod(0o755)
    (tmp_path / "task/gpt.py").write_text(program_text("served_shards_task"))
    return tmp_path / "task"


@pytest.fixture
def server(cluster: TestedCluster, folder: Path) -> Iterator[Server]:
    """Removed before the cluster, whose network it joins."""
    names = write_tokens(folder.parent / "shards")
    try:
        own = Server(f"{cluster.project}-shards", folder.parent / "shards")
        own.index(folder, names)
        yield own
    finally:
        docker("rm", "--force", f"{cluster.project}-shards", check=False)


def repeats(cluster: TestedCluster, node: int) -> Callable[[], bool]:
    """Whether a fetching process of the node has asked in vain and asks again."""
    program, engine = program_text("served_shards_repeated"), cluster.engine("hard")
    return lambda: int(engine.inside(engine.node(node), program, check=False).strip() or 0) > 0


def test_a_gpt_on_served_shards_is_killed_and_ends_with_equal_bits(
    cluster: TestedCluster, server: Server, folder: Path
) -> None:
    of_calm, of_hard = (
        ("--nodes", "2", "--task", f"{folder}/gpt.py:Gpt", "--run", run, "--args", FLAGS)
        for run in ("calm", "hard")
    )
    (folder / "quick").touch()
    indexed = len(server.asked())
    process = cluster.start(*of_calm)
    cluster.until(lambda: bool(cluster.left()["networks"]), process, "network")
    server.join(f"{cluster.project}_default")  # until then, the nodes know no `shards`, and ask again
    code, output = cluster.processes.wait(process, 250)
    calm = cluster.engine("calm").summary()
    assert code == 0 and calm is not None, output
    asked_in_calm = server.asked()[indexed:]
    check_requests(asked_in_calm, folder / "index.jsonl")

    (folder / "quick").unlink()
    process = cluster.start(*of_hard)
    engine = cluster.engine("hard")
    cluster.until(lambda: cluster.step() > 60, process, "step in the middle of the first epoch")
    docker("kill", server.name)
    engine.helper("sh", "-c", f"kill -9 {engine.node(1).pid}", options=["--pid=host"])
    cluster.until(lambda: engine.node(1).starts == 2, process, "restart of node 1")
    # Its cache was in memory: without the server, it has no sample.
    cluster.until(repeats(cluster, 1), process, "request of node 1 that is repeated")
    docker("start", server.name)
    cluster.until(lambda: cluster.step() > EPOCH + 40, process, "step in the middle of the second epoch")
    resumed = [int(str(event["step"])) for event in engine.events() if event["kind"] == "resumed"]
    assert resumed and all(0 < step < EPOCH for step in resumed)
    engine.compose("kill", "node")  # all at once, and Docker restarts none of them
    code, output = cluster.processes.wait(process, 100)
    assert code == KILLED, output

    (folder / "quick").touch()
    code, output = cluster.up(*of_hard)
    hard = engine.summary()
    assert code == 0 and hard is not None and f"finished at step {STEPS}" in output, output
    assert EPOCH < int(str(hard["resumed_from_step"])) < STEPS
    for summary in (calm, hard):
        assert (summary["global_step"], summary["world_size"]) == (STEPS, 2)
    assert hard["weights_sha256"] == calm["weights_sha256"] and hard["loss"] == calm["loss"]
    assert float(str(hard["loss"])) < 3, "it has learned more than how frequent each character is"
    check_requests(server.asked()[indexed + len(asked_in_calm) :], folder / "index.jsonl")
    code, output = cluster.call("down")
    assert code == 0 and f"{cluster.project}_default stays, because {server.name} is" in output, output


def check_requests(asked: list[tuple[str, str, str]], index: Path) -> None:
    """All blocks of the index were asked for and nothing else, by both nodes, and some again."""
    blocks = [json.loads(line) for line in index.read_text().splitlines()]
    assert len(blocks) == EPOCH and {block["count"] for block in blocks} == {BATCH}
    known = {
        (each["address"].rpartition("/")[2], f"bytes={each['offset']}-{each['offset'] + each['length'] - 1}")
        for each in blocks
    }
    assert {(name, span) for _, name, span in asked} == known
    assert len({who for who, _, _ in asked}) >= 2 and len(asked) > len(blocks)
