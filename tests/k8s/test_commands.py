"""`make k8s-...` against no cluster, and against a small API server through real kubectl."""

import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import OPERATOR, ApiServer

REPOSITORY = Path(__file__).parents[2]
MAKE = shutil.which("make") or "make"
INSTANCE = {"app.kubernetes.io/instance": "tandem"}
Make = Callable[..., tuple[int, str]]


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
    one_line(result, "knows no PyTorchJob", "kubectl apply --server-side", "OVERLAY=indexed-job")
    assert not any(method == "POST" for method, _ in server.requests)


def test_with_a_wrong_namespace(make: Make, api: Callable[..., ApiServer]) -> None:
    result = make("k8s-apply", "NAMESPACE=nowhere", kubeconfig=api().kubeconfig)
    one_line(result, "'nowhere' does not exist", "kubectl create namespace nowhere")


def test_with_a_wrong_overlay(make: Make) -> None:
    one_line(make("k8s-apply", "OVERLAY=gpuu"), "'gpuu'", "gpu", "indexed-job")


def test_without_kubectl(make: Make, tmp_path: Path) -> None:
    for program in ("bash", "python3"):
        (tmp_path / program).symlink_to(os.path.realpath(f"/usr/bin/{program}"))
    one_line(make("k8s-render", PATH=str(tmp_path)), "kubectl is not installed")


def test_pods_that_are_still_ending_stop_an_apply(make: Make, api: Callable[..., ApiServer]) -> None:
    server = api()
    server.add("/api/v1/namespaces/default/pods/tandem-master-0", "v1", "Pod", labels=INSTANCE,
               deletionTimestamp="2026-01-01T00:00:00Z")  # fmt: skip
    one_line(make("k8s-apply", kubeconfig=server.kubeconfig), "still ending", "kubectl wait --for=delete")


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


def test_try_without_kind_and_minikube(make: Make, tmp_path: Path) -> None:
    path = ":".join(
        part for part in os.environ["PATH"].split(":")
        if not any((Path(part) / name).exists() for name in ("kind", "minikube"))
    )  # fmt: skip
    one_line(make("k8s-try", PATH=path), "neither kind nor minikube")


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
            'case "$*" in *"get pods"*) echo \'{"items": []}\';; kustomize*) echo "kind: PyTorchJob";; esac\n'
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
        "logs --selector",
    ]
    positions = [steps.find(step) for step in wanted]
    assert -1 not in positions and positions == sorted(positions), steps
