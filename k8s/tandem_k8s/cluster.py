"""apply, logs, status, delete and try: kubectl, with the questions asked first. Standard library only.

Every failure that a person can mend is one line; what kubectl itself says is kept behind it.
"""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_k8s.render import DEFAULT_IMAGE, ROOT, UsageError, kinds, render

QUICK_SECONDS = 20
DELETE_SECONDS = 240  # longer than the grace period of the pods
OPERATOR_SECONDS = 300
OPERATOR = "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3"
KIND_CLUSTER = "tandem"


@dataclass(frozen=True)
class Resource:
    """A custom kind: its name in the API, and what to do where the cluster does not have it."""

    name: str
    install: str

    @property
    def group(self) -> str:
        return self.name.partition(".")[2]


CUSTOM = {
    "PyTorchJob": Resource(
        "pytorchjobs.kubeflow.org",
        f'the training operator is not installed: kubectl apply --server-side -k "{OPERATOR}", '
        "or take OVERLAY=indexed-job, which needs none",
    ),
    "JobSet": Resource(
        "jobsets.jobset.x-k8s.io", "JobSet is not installed: jobset.sigs.k8s.io/docs/installation"
    ),
    "TrainJob": Resource(
        "trainjobs.trainer.kubeflow.org", "Trainer is not installed: kubeflow.org/docs/components/trainer"
    ),
    "PodMonitor": Resource(
        "podmonitors.monitoring.coreos.com",
        "the Prometheus operator is not installed; install it, or leave monitoring out of OVERLAY",
    ),
}
JOBS = ("PyTorchJob", "TrainJob", "JobSet", "Job")
REMOVED = {  # kind -> resource; claims are not among them
    "PyTorchJob": "pytorchjobs.kubeflow.org", "TrainJob": "trainjobs.trainer.kubeflow.org",
    "TrainingRuntime": "trainingruntimes.trainer.kubeflow.org", "JobSet": "jobsets.jobset.x-k8s.io",
    "Job": "jobs.batch", "Service": "services", "NetworkPolicy": "networkpolicies.networking.k8s.io",
    "PodMonitor": "podmonitors.monitoring.coreos.com", "ConfigMap": "configmaps",
    "PrometheusRule": "prometheusrules.monitoring.coreos.com",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What to work on: the rendered manifest, where, and the run's name (app.kubernetes.io/instance)."""

    text: str
    namespace: str
    run: str = "tandem"

    @property
    def selector(self) -> str:
        return f"app.kubernetes.io/instance={self.run}"

    def kubectl(self, *arguments: str) -> list[str]:
        return ["kubectl", *(["--namespace", self.namespace] if self.namespace else []), *arguments]


def _ask(command: Sequence[str], seconds: float = QUICK_SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {seconds:g} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def preflight(target: Target) -> None:
    """Is there a cluster, the namespace, and every custom kind of the manifest? Raises UsageError."""
    answer = _ask(["kubectl", "version", "--output=json", "--request-timeout=10s"])
    if answer.returncode != 0 or "serverVersion" not in answer.stdout:
        raise UsageError(
            f"no cluster answers ({_last_line(answer)}); choose one with kubectl config use-context NAME, "
            "or make one on this machine: make k8s-try"
        )
    if target.namespace:
        found = _ask(["kubectl", "get", "namespace", target.namespace, "--output=name"])
        if "NotFound" in found.stderr:
            raise UsageError(
                f"the namespace {target.namespace!r} does not exist; make it with "
                f"kubectl create namespace {target.namespace}, or give another: NAMESPACE=..."
            )
    for kind in kinds(target.text):
        if kind not in CUSTOM:
            continue
        resource = CUSTOM[kind]
        served = _ask(["kubectl", "api-resources", f"--api-group={resource.group}", "--output=name"])
        if resource.name not in served.stdout.split():
            raise UsageError(f"the cluster knows no {kind}: {resource.install}")


def apply(target: Target) -> int:
    """Apply the manifest once nothing of an earlier run is still ending. Raises UsageError."""
    preflight(target)
    pods = _ask(target.kubectl("get", "pods", "--selector", target.selector, "--output=json"))
    if pods.returncode == 0 and any(
        "deletionTimestamp" in pod["metadata"] for pod in json.loads(pods.stdout).get("items", [])
    ):
        raise UsageError(
            f"pods of an earlier {target.run} are still ending, and a new job would meet them; wait: "
            f"kubectl wait --for=delete pod --selector {target.selector} --timeout={DELETE_SECONDS}s"
        )
    done = subprocess.run(target.kubectl("apply", "--filename", "-"), input=target.text, text=True)
    return done.returncode


def logs(target: Target) -> int:
    """Follow all pods of the run, each line with its pod's name."""
    preflight(target)
    return subprocess.run(
        target.kubectl("logs", "--selector", target.selector, "--follow", "--prefix", "--tail=100",
                       "--max-log-requests=100", "--ignore-errors")
    ).returncode  # fmt: skip


def status(target: Target) -> int:
    """The job, its pods with their nodes, its claims; then what the cluster last said about them."""
    preflight(target)
    jobs = [REMOVED[kind] for kind in kinds(target.text) if kind in JOBS]
    what = ",".join([*jobs, "pods", "persistentvolumeclaims"])
    code = subprocess.run(
        target.kubectl("get", what, "--selector", target.selector, "--output=wide")
    ).returncode
    warnings = ("--sort-by=.lastTimestamp", "--field-selector=type=Warning")
    subprocess.run(target.kubectl("get", "events", *warnings))
    return code


def delete(target: Target, purge: bool) -> int:
    """Remove the job and all but its volume, and wait until its pods are gone: they may be saving."""
    preflight(target)
    present = [REMOVED[kind] for kind in kinds(target.text) if kind in REMOVED]
    what = ",".join([*present, *(["persistentvolumeclaims"] if purge else [])])
    wait = [f"--timeout={DELETE_SECONDS}s"]
    code = subprocess.run(
        target.kubectl("delete", what, "--selector", target.selector, "--wait=true", *wait)
    ).returncode
    gone = subprocess.run(
        target.kubectl("wait", "--for=delete", "pod", "--selector", target.selector, *wait)
    ).returncode
    if not purge:
        print("the volume with the checkpoints stays; the next apply resumes from it (PURGE=1 removes it)")
    return code or gone


def try_it(image: str) -> int:
    """On this machine: a cluster, the image in it, the operator, the cpu overlay; then its logs."""
    tool = next((name for name in ("kind", "minikube") if shutil.which(name)), None)
    if tool is None:
        raise UsageError("neither kind nor minikube is installed; either makes a cluster on this machine")
    for program in ("docker", "kubectl"):
        if shutil.which(program) is None:
            raise UsageError(f"{program} is not installed; make k8s-try needs it")
    image = image or f"{DEFAULT_IMAGE}:cpu"
    steps = [["make", "image", "TORCH=cpu", f"IMAGE={image}"], *_cluster_steps(tool, image)]
    steps.append(["kubectl", "apply", "--server-side", "--kustomize", OPERATOR])
    steps.append(["kubectl", "--namespace", "kubeflow", "rollout", "status", "deployment/training-operator",
                  f"--timeout={OPERATOR_SECONDS}s"])  # fmt: skip
    for step in steps:
        print("+", " ".join(step), flush=True)
        if subprocess.run(step, cwd=ROOT.parent).returncode != 0:
            raise UsageError(f"this failed: {' '.join(step)}")
    target = Target(render("cpu", image), "default")
    code = apply(target)
    if code != 0:
        return code
    ready = ("--for=condition=Ready", f"--timeout={OPERATOR_SECONDS}s")
    subprocess.run(target.kubectl("wait", "pod", "--selector", target.selector, *ready))
    return logs(target)


def _cluster_steps(tool: str, image: str) -> list[list[str]]:
    if tool == "minikube":
        running = _ask(["minikube", "status"]).returncode == 0
        return [*([] if running else [["minikube", "start"]]), ["minikube", "image", "load", image]]
    clusters = _ask(["kind", "get", "clusters"]).stdout.split()
    create = [] if KIND_CLUSTER in clusters else [["kind", "create", "cluster", "--name", KIND_CLUSTER]]
    use = ["kubectl", "config", "use-context", f"kind-{KIND_CLUSTER}"]
    return [*create, use, ["kind", "load", "docker-image", image, "--name", KIND_CLUSTER]]
