"""Every pod template under `podman kube play`, with its security context and probes as written."""

import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from podman import Podman, as_pod
from small_jobs import SMALL, manifest, ten_lines
from small_runs import TASK

from patience import patient
from tandem_k8s.contract import plan
from tandem_k8s.documents import MANIFESTS, Document, find, jobset_spec, load

END_SECONDS = 90.0
ONE_NODE = {"jobset": {"NODES": "1"}, "indexed-job": {"NNODES": "1"}}


@pytest.fixture(scope="module")
def podman(tmp_path_factory: pytest.TempPathFactory, require: Callable[..., None]) -> Iterator[Podman]:
    """A podman in which a pod can start, with the stand-in image under the names that the manifests use."""
    require("podman", shutil.which("podman") is not None and os.geteuid() == 0, "no podman, or not root")
    own = Podman(tmp_path_factory.mktemp("podman"))
    try:
        require("podman", *own.works())
        for tag in ("cuda", "cpu"):
            own.build(f"tandem:{tag}")
        yield own
    finally:
        own.reset()


def one_node(documents: list[Document]) -> list[Document]:
    """The same manifest for a single node: what a pod may do does not depend on how many there are."""
    if documents[0]["kind"] == "ClusterTrainingRuntime":
        documents = [*load(ten_lines()), *documents]
    kinds = {document["kind"] for document in documents}
    if "PyTorchJob" in kinds:
        find(documents, "PyTorchJob")["spec"]["pytorchReplicaSpecs"].pop("Worker")
    elif "TrainJob" in kinds:
        find(documents, "TrainJob")["spec"]["trainer"]["numNodes"] = 1
    elif "JobSet" in kinds:
        job = jobset_spec(find(documents, "JobSet"))["replicatedJobs"][0]["template"]["spec"]
        job.update(completions=1, parallelism=1)
    else:
        find(documents, "Job")["spec"].update(completions=1, parallelism=1)
    return documents


@pytest.mark.parametrize(
    "name", [MANIFESTS[0], *(pytest.param(name, marks=pytest.mark.soak) for name in MANIFESTS[1:])]
)
def test_a_pod_runs_as_restricted_and_its_probes_answer(podman: Podman, name: str, tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(TASK)
    tmp_path.chmod(0o755)
    variables = {**SMALL, "TANDEM_STEPS": "100000", "TANDEM_TASK__DELAY": "0.01", **ONE_NODE.get(name, {})}
    (plan_of_node_0,) = plan(one_node(manifest(name, variables)))
    pod = as_pod(plan_of_node_0, tmp_path)
    done = podman.play(pod)
    assert done.returncode == 0, done.stderr.decode()
    running = f"{plan_of_node_0.name}-{plan_of_node_0.template.main}"
    try:
        _look_inside(podman, running, plan_of_node_0.template.container())
        podman.output("stop", "--time", "60", running)
        state = podman.inspect(running)["State"]
        assert state["ExitCode"] == 143, podman.output("logs", running)
    finally:
        podman.call("pod", "rm", "--force", "--time", "0", plan_of_node_0.name)


def _look_inside(podman: Podman, running: str, container: Document) -> None:
    probe = ["exec", running, *container["startupProbe"]["exec"]["command"]]
    deadline = time.monotonic() + patient(END_SECONDS)
    while (done := podman.call(*probe)).returncode != 0 or b"train" not in done.stdout:
        logs = podman.call("logs", running)
        assert podman.inspect(running)["State"]["Running"], logs.stdout.decode() + logs.stderr.decode()
        assert time.monotonic() < deadline, done.stdout.decode() + done.stderr.decode() + logs.stderr.decode()
        time.sleep(0.3)
    assert podman.call("healthcheck", "run", running).returncode == 0  # podman's reading of the livenessProbe
    status = podman.output("exec", running, "cat", "/proc/1/status")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4 and fields["Gid"].split() == ["10001"] * 4
    assert all(int(fields[name], 16) == 0 for name in ("CapEff", "CapPrm", "CapBnd"))
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    assert podman.output("exec", running, "cat", "/proc/1/comm").strip() == "tini"
    for path in ("/", "/etc", "/usr"):
        assert podman.call("exec", running, "touch", f"{path.rstrip('/')}/written").returncode != 0
    for mount in ("/checkpoints", "/data", "/tmp", "/dev/shm"):
        podman.output("exec", running, "touch", f"{mount}/written")
