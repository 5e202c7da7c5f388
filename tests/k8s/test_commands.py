"""`make k8s-...` against no cluster, and against a small API server through real kubectl."""

import itertools
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import OPERATOR, ApiServer

from patience import patient

REPOSITORY = Path(__file__).parents[2]
MAKE = shutil.which("make") or "make"
INSTANCE = {"app.kubernetes.io/instance": "tandem"}
Make = Callable[..., tuple[int, str]]
uids = itertools.count()


@pytest.fixture
def make(processes: Any, tmp_path: Path, require: Callable[..., None]) -> Make:
    """`make TARGET VARIABLE=value...`: exit code and output, without make's own last line."""
    require("kubectl")

    def run(target: str, *given: str, kubeconfig: Path | None = None, **environment: str) -> tuple[int, str]:
        own = {**os.environ, "KUBECONFIG": str(kubeconfig or tmp_path / "no-config"), **environment}
        command = [MAKE, "--no-print-directory", "-C", str(REPOSITORY), target, *given]
        code, output = processes.run(command, env=own)
        lines = [line for line in output.splitlines() if not line.startswith("make: ***")]
        return code, "\n".join(lines)

    return run


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Callable[..., ApiServer]]:
    started: list[ApiServer] = []

    def start(groups: dict[str, dict[str, str]] = OPERATOR) -> ApiServer:
        started.append(ApiServer(tmp_path, groups))
        return started[-1]

    yield start
    for each in started:
        each.close()


def one_line(result: tuple[int, str], *words: str) -> None:
    code, output = result
    assert code != 0
    assert len(output.splitlines()) == 1, output
    assert all(word in output for word in words), output


@pytest.mark.parametrize("target", ["k8s-apply", "k8s-logs", "k8s-status", "k8s-delete"])
def test_without_a_cluster(make: Make, target: str) -> None:
    one_line(make(target), "no cluster answers", "make k8s-try")


def test_without_the_operators_crd(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api({})
    result = make("k8s-apply", kubeconfig=server.kubeconfig)
    said = ("does not know the kind PyTorchJob", "kubectl apply --server-side", "OVERLAY=indexed-job")
    one_line(result, *said)
    assert not any(method == "POST" for method, _ in server.requests)


def test_with_a_wrong_namespace(make: Make, api: Callable[..., ApiServer]) -> None:
    result = make("k8s-apply", "NAMESPACE=nowhere", kubeconfig=api().kubeconfig)
    one_line(result, "'nowhere' does not exist", "kubectl create namespace nowhere")


def test_with_a_wrong_overlay(make: Make) -> None:
    one_line(make("k8s-apply", "OVERLAY=gpuu"), "'gpuu'", "gpu", "indexed-job")


def test_without_kubectl(make: Make, tmp_path: Path) -> None:
    for program in ("bash", "python3"):
        (tmp_path / program).symlink_to(os.path.realpath(f"/usr/bin/{program}"))
    said = ("kubectl is not installed", "sudo apt-get install kubernetes-client")
    for target in ("k8s-render", "k8s-apply"):
        one_line(make(target, PATH=str(tmp_path)), *said)


def test_pods_that_are_still_ending_stop_an_apply(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    server.add("/api/v1/namespaces/default/pods/tandem-master-0", "v1", "Pod", labels=INSTANCE,
               deletionTimestamp="2026-01-01T00:00:00Z")  # fmt: skip
    one_line(make("k8s-apply", kubeconfig=server.kubeconfig), "still ending", "kubectl wait --for=delete")


@pytest.mark.core
def test_apply_then_delete_keeps_the_volume(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    code, output = make("k8s-apply", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0, output
    assert {"PyTorchJob", "PersistentVolumeClaim", "NetworkPolicy"} <= server.kinds()
    code, output = make("k8s-status", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0 and "tandem" in output, output
    code, output = make("k8s-delete", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0 and "the volume with the checkpoints stays" in output, output
    assert {"PyTorchJob", "NetworkPolicy"}.isdisjoint(server.kinds())
    assert "PersistentVolumeClaim" in server.kinds()
    code, output = make("k8s-delete", "OVERLAY=cpu", "PURGE=1", kubeconfig=server.kubeconfig)
    assert code == 0 and "PersistentVolumeClaim" not in server.kinds(), output


JOB = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs/tandem"
PODS = "/api/v1/namespaces/default/pods"


def add_job(server: ApiServer, *conditions: str) -> dict[str, Any]:
    job = server.add(JOB, "kubeflow.org/v1", "PyTorchJob", labels=INSTANCE)
    job["status"] = {"conditions": [{"type": each, "status": "True", "message": ""} for each in conditions]}
    return job


def add_pod(server: ApiServer, name: str, state: dict[str, Any], **status: Any) -> dict[str, Any]:
    """A pod of this state, in the place of one of the same name."""
    role = name.split("-")[1]
    labels = {**INSTANCE, "training.kubeflow.org/replica-type": role}
    pod = server.add(f"{PODS}/{name}", "v1", "Pod", labels=labels, uid=f"{name}-{next(uids)}")
    container = {"name": "pytorch", "state": state, "restartCount": 0, **status}
    pod["spec"] = {"nodeName": "n1", "containers": [{"name": "pytorch"}]}
    pod["status"] = {"phase": "Running", "containerStatuses": [container]}
    return pod


ENDED = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}


def test_apply_over_a_job_that_runs_or_has_ended_says_so(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    add_job(server, "Created", "Running")
    result = make("k8s-apply", kubeconfig=server.kubeconfig)
    one_line(result, "PyTorchJob tandem exists and is still running", "make k8s-logs", "make k8s-delete")
    add_job(server, "Created", "Succeeded")
    one_line(make("k8s-apply", kubeconfig=server.kubeconfig), "has ended, Succeeded (0)", "make k8s-delete")
    assert not any(method in ("POST", "PATCH") for method, _ in server.requests)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"accessModes": ["ReadWriteOnce"]}, "access modes ReadWriteOnce, and the manifest asks for "),
        ({"resources": {"requests": {"storage": "1Ti"}}}, "1Ti, and the manifest asks for 20Gi: a claim "),
        ({"resources": {"requests": {"storage": "10Gi"}}}, ""),
    ],
)  # fmt: skip
def test_a_claim_that_cannot_become_the_manifests_is_seen_before_anything_changes(
    make: Make, api: Callable[..., ApiServer], spec: dict[str, Any], said: str
) -> None:
    server = api()
    path = "/api/v1/namespaces/default/persistentvolumeclaims/tandem-checkpoints"
    claim = server.add(path, "v1", "PersistentVolumeClaim", labels=INSTANCE)
    claim["spec"] = {"accessModes": ["ReadWriteMany"], "storageClassName": "nfs", **spec}
    result = make("k8s-apply", kubeconfig=server.kubeconfig)
    if said:
        one_line(result, "the claim tandem-checkpoints exists with", said, "PURGE=1")
    assert ("PyTorchJob" in server.kinds()) is not bool(said)


def test_a_queue_nobody_admits_from(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    one_line(make("k8s-apply", "OVERLAY=kueue", kubeconfig=server.kubeconfig), "no Kueue", "leave kueue out")
    served = api({**OPERATOR, "kueue.x-k8s.io/v1beta1": {"localqueues": "LocalQueue"}})
    code, output = make("k8s-apply", "OVERLAY=kueue", kubeconfig=served.kubeconfig)
    assert code == 0, output


def test_logs_of_no_job(make: Make, api: Callable[..., ApiServer]) -> None:
    one_line(make("k8s-logs", kubeconfig=api().kubeconfig), "there is no job tandem;", "k8s-apply")


def test_logs_wait_follow_replaced_pods_and_end_with_the_jobs_code(
    make: Make, api: Callable[..., ApiServer], processes: Any
) -> None:
    server = api()
    add_job(server, "Created")
    add_pod(server, "tandem-master-0", {"waiting": {"reason": "ContainerCreating"}})
    own = {**os.environ, "KUBECONFIG": str(server.kubeconfig)}
    command = [MAKE, "--no-print-directory", "-C", str(REPOSITORY), "k8s-logs"]
    process = processes.start(command, env=own)
    said = process.stdout.readline()
    assert said == "waiting for containers: tandem-master-0  pytorch  waits: ContainerCreating\n"
    server.logs.update({"tandem-master-0": "step 1\n", "tandem-worker-0": "a first worker\n"})
    add_pod(server, "tandem-master-0", {"running": {}})
    add_pod(server, "tandem-worker-0", {"running": {}})
    lines = {process.stdout.readline() for _ in range(2)}
    assert lines == {
        "[pod/tandem-master-0/pytorch] step 1\n", "[pod/tandem-worker-0/pytorch] a first worker\n"
    }  # fmt: skip
    server.logs["tandem-worker-0"] = "its successor\n"
    add_pod(server, "tandem-worker-0", {"running": {}})
    assert process.stdout.readline() == "[pod/tandem-worker-0/pytorch] its successor\n"
    job = server.objects.pop(JOB)  # an API server that fails now and then ends no follower
    asked = len(server.requests)
    while not any(path.endswith("/pytorchjobs") for _, path in server.requests[asked:]):
        time.sleep(0.1)
    time.sleep(0.5)  # the answer is on its way
    server.objects[JOB] = job
    assert process.poll() is None
    add_pod(server, "tandem-master-0", {"terminated": {"exitCode": 3}})
    add_job(server, "Created", "Failed")["status"]["conditions"][-1]["message"] = "tandem has failed"
    code, rest = processes.wait(process)
    assert "tandem has ended: Failed (3): tandem has failed" in rest.splitlines()
    assert code == 2 and "Error 3" in rest  # make's own is 2


def test_status_has_this_runs_reasons_codes_warnings_and_the_dead_node(
    make: Make, api: Callable[..., ApiServer]
) -> None:
    server = api()
    add_job(server, "Created", "Running")
    add_pod(server, "tandem-master-0", {"running": {}}, restartCount=2, lastState=ENDED)
    add_pod(server, "tandem-worker-0", ENDED)["spec"]["nodeName"] = "n2"
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"}}
    add_pod(server, "tandem-worker-1", waiting)
    for number, (name, when) in enumerate(
        [("tandem-worker-1", "2026-01-01T00:00:02Z"), ("stranger", "2026-01-01T00:00:03Z"),
         ("tandem-worker-1", "2026-01-01T00:00:01Z")]
    ):  # fmt: skip
        event = server.add(f"/api/v1/namespaces/default/events/e{number}", "v1", "Event")
        event |= {"type": "Warning", "reason": f"why-{number}", "message": "m", "lastTimestamp": when}
        event |= {"involvedObject": {"name": name}, "count": number}
    for name, ready in (("n1", "True"), ("n2", "Unknown")):
        node = server.add(f"/api/v1/nodes/{name}", "v1", "Node")
        node["status"] = {"conditions": [{"type": "Ready", "status": ready}]}
    code, output = make("k8s-status", kubeconfig=server.kubeconfig)
    assert code == 0, output
    assert "tandem-master-0  pytorch  runs; before: ended with 137 (OOMKilled); 2 restarts" in output
    assert "tandem-worker-0  pytorch  ended with 137 (OOMKilled)" in output
    assert "tandem-worker-1  pytorch  waits: ImagePullBackOff, Back-off pulling image x" in output
    assert "stranger" not in output
    assert output.index("why-2: m (2 times)") < output.index("why-0: m")
    assert "node n2 does not answer, and tandem-worker-0 cannot end there" in output
    assert "kubectl taint nodes n2 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in output


def test_delete_beside_a_dead_node_does_not_wait_for_it(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    code, output = make("k8s-apply", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0, output
    add_pod(server, "tandem-worker-0", {"running": {}})
    node = server.add("/api/v1/nodes/n1", "v1", "Node")
    node["status"] = {"conditions": [{"type": "Ready", "status": "Unknown"}]}
    code, output = make("k8s-delete", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code != 0, output
    assert "node n1 does not answer, and tandem-worker-0 cannot end there" in output
    assert "the volume with the checkpoints stays" in output
    assert "PyTorchJob" not in server.kinds()


def test_delete_gives_a_pod_that_has_not_begun_no_time_to_save(
    make: Make, api: Callable[..., ApiServer]
) -> None:
    """The operator's init container is deaf to SIGTERM: a deleted job stayed for its grace period."""
    server = api()
    code, output = make("k8s-apply", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0, output
    add_pod(server, "tandem-master-0", {"running": {}})
    waiting = add_pod(server, "tandem-worker-0", {"waiting": {"reason": "PodInitializing"}})
    waiting["status"]["initContainerStatuses"] = [
        {"name": "init-pytorch", "restartCount": 0, "state": {"running": {}}}
    ]
    threading.Thread(target=end_with_its_job, args=[server, f"{PODS}/tandem-master-0"], daemon=True).start()
    code, output = make("k8s-delete", "OVERLAY=cpu", kubeconfig=server.kubeconfig)
    assert code == 0, output
    graces = {path.rpartition("/")[2]: seconds for path, seconds in server.graces.items() if "/pods/" in path}
    assert graces == {"tandem-worker-0": 1}


def end_with_its_job(server: ApiServer, pod: str) -> None:
    """As the operator's pods do, once they have saved."""
    while not any(method == "DELETE" and "/pytorchjobs/" in path for method, path in server.requests):
        time.sleep(0.02)
    del server.objects[pod]


def test_try_without_kind_and_minikube(make: Make, tmp_path: Path) -> None:
    path = ":".join(
        part for part in os.environ["PATH"].split(":")
        if not any((Path(part) / name).exists() for name in ("kind", "minikube"))
    )  # fmt: skip
    one_line(make("k8s-try", PATH=path), "install kind or minikube", "kind.sigs.k8s.io")


def test_try_on_a_bare_machine_names_all_that_is_missing(make: Make, tmp_path: Path) -> None:
    for program in ("bash", "python3"):
        (tmp_path / program).symlink_to(os.path.realpath(f"/usr/bin/{program}"))
    said = ("kind or minikube (", "docker (on Debian: sudo make docker-host)", "kubectl (on Debian: ")
    one_line(make("k8s-try", PATH=str(tmp_path)), *said)


JOB_THAT_ENDED = '{"status": {"conditions": [{"type": "Succeeded", "status": "True"}]}}'


def test_try_builds_loads_installs_applies_and_follows(make: Make, tmp_path: Path) -> None:
    """The order of the steps, by programs that write down how they were called."""
    calls = tmp_path / "calls"
    for program in ("kind", "docker", "make", "kubectl"):
        script = tmp_path / "bin" / program
        script.parent.mkdir(exist_ok=True)
        script.write_text(
            "#!/bin/sh\n"
            f'echo "{program} $*" >>{calls}\n'
            'case "$1 $2" in "version --output=json") echo \'{"serverVersion": {}}\';; '
            '"api-resources --api-group=kubeflow.org") echo pytorchjobs.kubeflow.org;; '
            "*json*) echo '{}';; esac\n"
            'case "$*" in *"get pods"*) echo \'{"items": []}\';; kustomize*) echo "kind: PyTorchJob";; '
            f"*pytorchjobs*json) grep -q 'apply --filename' {calls} && echo '{JOB_THAT_ENDED}';; esac\n"
            "exit 0\n"
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    code, output = make("k8s-try", PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert code == 0, output
    steps = calls.read_text()
    wanted = [
        "make image TORCH=cpu IMAGE=tandem:cpu",
        "kind create cluster",
        "kind load docker-image tandem:cpu",
        "kubectl apply --server-side --kustomize",
        "rollout status deployment/training-operator",
        "apply --filename -",
        "get pytorchjobs.kubeflow.org --selector app.kubernetes.io/instance=tandem --output=json\nkubectl "
        "--namespace default get pods",
    ]
    positions = [steps.find(step) for step in wanted]
    assert -1 not in positions and positions == sorted(positions), steps


FORWARDER = """#!/bin/sh
echo "$*" >>{calls}
case "$1 $2" in "version --output=json") echo '{{"serverVersion": {{}}}}';; esac
case "$*" in
  *api-resources*) echo pytorchjobs.kubeflow.org;;
  kustomize*) echo "kind: PyTorchJob";;
  *"get pytorchjobs"*) echo '{{"items": [{{"metadata": {{"name": "tandem"}}}}]}}';;
  *"get services"*) echo '{{"items": [{services}]}}';;
  *port-forward*) echo "Forwarding from 127.0.0.1:8000 -> 19469";;
esac
"""
SERVICE = '{"metadata": {"name": "tandem-metrics"}}'


def tandem_k8s(processes: Any, folder: Path, *words: str, services: str = SERVICE) -> tuple[int, str]:
    """`tandem k8s ...` with a kubectl that writes down how it was called."""
    program = folder / "bin" / "kubectl"
    program.parent.mkdir(exist_ok=True)
    program.write_text(FORWARDER.format(calls=folder / "calls", services=services))
    program.chmod(0o755)
    own = {**os.environ, "PATH": f"{program.parent}:{os.environ['PATH']}"}
    command = [sys.executable, "-m", "tandem", "k8s", *words]
    code, output = processes.run(command, env=own)
    return code, output


def test_forward_leads_to_node_0(processes: Any, tmp_path: Path) -> None:
    words = ("forward", "--namespace", "team", "--port", "8000")
    code, output = tandem_k8s(processes, tmp_path, *words)
    assert code == 0 and "http://localhost:8000/metrics" in output, output
    last = (tmp_path / "calls").read_text().splitlines()[-1]
    assert last == "--namespace team port-forward service/tandem-metrics 8000:19469"


def test_forward_without_the_service_is_one_line(processes: Any, tmp_path: Path) -> None:
    one_line(tandem_k8s(processes, tmp_path, "forward", services=""), "no Service tandem-metrics")


def test_make_forwards_too(make: Make, api: Callable[..., ApiServer]) -> None:
    one_line(make("k8s-forward", kubeconfig=api().kubeconfig), "no job tandem;", "make k8s-apply")


def test_apply_names_what_comes_next(make: Make, api: Callable[..., ApiServer]) -> None:
    code, output = make("k8s-apply", "OVERLAY=job,cpu", kubeconfig=api().kubeconfig)
    assert code == 0, output
    assert "make k8s-logs OVERLAY=job,cpu" in output and "make k8s-forward OVERLAY=job,cpu" in output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--with", "gpu,cpu"], "--with: invalid value 'gpu,cpu'; cpu contradicts gpu"),
        (["--kind", "jobset", "--with", "elastic"], "jobset has no component elastic"),
        (["--kind", "jobset", "--with", "trainjob"], "two kinds of job"),
        (["--with", "gpuu"], "gpuu is unknown; did you mean gpu?"),
        (
            ["--kind", "trainjob", "--with", "monitorin"],
            "did you mean monitoring? trainjob allows cpu, gpu, ",
        ),
        (["--with", "jobst"], "did you mean jobset?"),
        (["--kind", "jobst"], "did you mean jobset?"),
        (["--nodes", "0"], "--nodes: invalid value '0'; expected an integer >= 1"),
        (["--name", "A_b"], "--name: invalid value 'A_b'; expected at most 50 lowercase letters"),
        (["--image", "two words"], "--image: invalid value 'two words'"),
    ],
)
def test_what_tandem_k8s_cannot_render_is_one_line_and_2(
    processes: Any, words: list[str], said: str, require: Callable[..., None]
) -> None:
    require("kubectl")
    result = processes.run([sys.executable, "-m", "tandem", "k8s", "render", *words])
    one_line(result, said)
    assert result[0] == 2


def test_a_shared_runtime_is_not_deleted_with_a_job(processes: Any, require: Callable[..., None]) -> None:
    require("kubectl")
    words = ["-m", "tandem", "k8s", "delete", "--kind", "cluster-runtime"]
    one_line(processes.run([sys.executable, *words]), "all namespaces share it", "kubectl delete")


def test_tandem_k8s_speaks_of_its_own_commands(processes: Any, tmp_path: Path) -> None:
    own = {**os.environ, "KUBECONFIG": str(tmp_path / "none")}
    result = processes.run([sys.executable, "-m", "tandem", "k8s", "apply"], env=own)
    one_line(result, "no cluster answers")
    assert result[0] == 2


def test_the_verbs_need_nothing_but_python(make: Make, tmp_path: Path) -> None:
    """As make calls them: no package of site-packages is imported."""
    source = str(REPOSITORY / "src")
    program = f"import sys; sys.path.insert(0, {source!r}); from tandem.kubernetes import commands, __main__"
    command = [sys.executable, "-S", "-I", "-c", f"{program}; print(sorted(sys.modules))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, done.stderr
    assert "pydantic" not in done.stdout and "argparse" in done.stdout


def typed(processes: Any, *words: str) -> tuple[int, str]:
    code, output = processes.run([sys.executable, "-m", "tandem", "k8s", *words])
    return int(code), str(output)


def test_components_may_be_named_one_by_one(processes: Any, require: Callable[..., None]) -> None:
    """The last one won, and a job for GPUs came without them."""
    require("kubectl")
    code, output = typed(processes, "render", "--with", "gpu", "--with", "kueue")
    assert code == 0 and "nvidia.com/gpu" in output and "kueue.x-k8s.io/queue-name" in output
    assert output == typed(processes, "render", "--with", "gpu,kueue")[1]


@pytest.mark.parametrize(
    "words",
    [
        ("render", "--namespace", "ml"),
        ("status", "--nodes", "3"),
        ("status", "--purge"),
        ("logs", "--port", "8080"),
        ("status", "--namespace", "ML_team"),
        ("logs", "--name", "Bad Name"),
    ],
)
def test_an_option_that_a_verb_does_not_read_is_refused(processes: Any, words: tuple[str, ...]) -> None:
    code, output = typed(processes, *words)
    assert code == 2 and len(output.splitlines()) == 1 and words[1] in output, output


def test_verbs_find_a_job_by_its_name(
    make: Make, api: Callable[..., ApiServer], processes: Any, tmp_path: Path
) -> None:
    """Two jobs in one namespace: each verb reads, and deletes, only the one that it was told."""
    server = api()
    for name in ("tandem", "other"):
        code, output = make(
            "k8s-apply", "OVERLAY=cpu", f"NAME={name}", "NODES=2", kubeconfig=server.kubeconfig
        )
        assert code == 0, output
    assert "make k8s-logs OVERLAY=cpu NAME=other" in output
    jobs = "/apis/kubeflow.org/v1/namespaces/default/pytorchjobs"
    assert server.objects[f"{jobs}/other"]["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    code, output = make("k8s-status", "NAME=other", kubeconfig=server.kubeconfig)
    assert code == 0 and "other-checkpoints" in output and "tandem-checkpoints" not in output, output
    one_line(make("k8s-logs", "NAME=third", kubeconfig=server.kubeconfig), "no job third", "NAME=third")
    code, output = make("k8s-delete", "NAME=other", "PURGE=1", kubeconfig=server.kubeconfig)
    names = {each["metadata"]["name"] for each in server.objects.values()}
    assert code == 0 and names == {"default", "tandem", "tandem-metrics", "tandem-checkpoints"}, output


def test_forward_finds_the_service_of_a_name(processes: Any, tmp_path: Path) -> None:
    service = '{"metadata": {"name": "other-metrics"}}'
    for flag in ("--name", "--run"):
        code, output = tandem_k8s(processes, tmp_path, "forward", flag, "other", services=service)
        assert code == 0, output
        assert (tmp_path / "calls").read_text().splitlines()[
            -1
        ] == "port-forward service/other-metrics 19469:19469"


def test_make_says_so_too(make: Make) -> None:
    one_line(make("k8s-render", "NAMESPACE=ml"), "NAMESPACE", "render does not read it")
