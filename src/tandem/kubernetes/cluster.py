"""apply, logs, forward, status and delete: check first, then call kubectl. Standard library only.

Every failure that a user can fix is a one-line message, chained to kubectl's own error if there is one.
"""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.kubernetes import job_state
from tandem.kubernetes.parameters import JOB, option, typed
from tandem.kubernetes.render import GET_KUBECTL, KIND, UsageError, kinds

QUICK_SECONDS = 20
DELETE_SECONDS = 240  # longer than the pods' grace period
OPERATOR = "github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_GROUP = "kueue.x-k8s.io"
WARNINGS = 20  # number of newest warnings to show
PORT = 19469  # of the metrics
POLL_SECONDS = 2.0
MISSED = 5  # how many consecutive answers may be missing while pods are followed
LAST_WORDS_SECONDS = 10.0  # for the rest of the logs, after the job has ended
LAST_LINES = 100  # of a pod that started earlier

Followed = dict[tuple[str, str, int], subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Resource:
    """A custom kind: its name in the API, and what to do if the cluster does not have it."""

    name: str
    install: str

    @property
    def group(self) -> str:
        return self.name.partition(".")[2]


CUSTOM = {
    "PyTorchJob": Resource(
        "pytorchjobs.kubeflow.org",
        f'the training operator is not installed: kubectl apply --server-side -k "{OPERATOR}", '
        "or use {with}=indexed-job, which needs none",
    ),
    "JobSet": Resource(
        "jobsets.jobset.x-k8s.io", "JobSet is not installed: jobset.sigs.k8s.io/docs/installation"
    ),
    "TrainJob": Resource(
        "trainjobs.trainer.kubeflow.org", "Trainer is not installed: kubeflow.org/docs/components/trainer"
    ),
    "ClusterTrainingRuntime": Resource(
        "clustertrainingruntimes.trainer.kubeflow.org",
        "Trainer is not installed: kubeflow.org/docs/components/trainer",
    ),
    "PodMonitor": Resource(
        "podmonitors.monitoring.coreos.com",
        "the Prometheus operator is not installed; install it, or leave monitoring out of {with}",
    ),
}
JOBS = ("PyTorchJob", "TrainJob", "JobSet", "Job")
REMOVED = {  # kind -> resource; persistent volume claims are not included
    "PyTorchJob": "pytorchjobs.kubeflow.org", "TrainJob": "trainjobs.trainer.kubeflow.org",
    "TrainingRuntime": "trainingruntimes.trainer.kubeflow.org", "JobSet": "jobsets.jobset.x-k8s.io",
    "Job": "jobs.batch", "Service": "services", "NetworkPolicy": "networkpolicies.networking.k8s.io",
    "PodMonitor": "podmonitors.monitoring.coreos.com", "ConfigMap": "configmaps",
    "PrometheusRule": "prometheusrules.monitoring.coreos.com",
}  # fmt: skip


@dataclass(frozen=True)
class Target:
    """What to work on: rendered manifest, namespace, job's name and selection.

    The name is the label app.kubernetes.io/instance.
    """

    text: str
    namespace: str
    name: str = JOB
    selection: str = KIND

    def command(self, verb: str, **more: str) -> str:
        """Return the command to type for the same job: `make k8s-logs OVERLAY=trainjob`."""
        options = {"--with": self.selection} if self.selection != KIND else {}
        options |= {"--name": self.name} if self.name != JOB else {}
        options |= {"--namespace": self.namespace} if self.namespace else {}
        return typed(verb, {**options, **{f"--{name}": text for name, text in more.items()}})

    @property
    def selector(self) -> str:
        return f"app.kubernetes.io/instance={self.name}"

    def kubectl(self, *arguments: str) -> list[str]:
        return ["kubectl", *(["--namespace", self.namespace] if self.namespace else []), *arguments]


def ask(command: Sequence[str], seconds: float = QUICK_SECONDS) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except FileNotFoundError:
        raise UsageError(f"{command[0]} is not installed; {GET_KUBECTL}") from None
    except subprocess.TimeoutExpired:
        # 124 is the exit code of timeout(1).
        return subprocess.CompletedProcess(command, 124, "", f"no answer within {seconds:g} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return lines[-1].strip() if lines else f"exit code {done.returncode}"


def preflight(target: Target) -> None:
    """Check that there are a cluster, the namespace, and all custom kinds. Raises UsageError."""
    # The limit is below QUICK_SECONDS, so that kubectl's own reason arrives in time.
    answer = ask(["kubectl", "version", "--output=json", "--request-timeout=10s"])
    # Without a cluster, kubectl still prints its own version.
    if answer.returncode != 0 or "serverVersion" not in answer.stdout:
        raise UsageError(
            f"no cluster answers ({_last_line(answer)}); choose one with kubectl config use-context NAME, "
            "or create one on this machine: make k8s-try in a checkout of tandem"
        )
    if target.namespace:
        found = ask(["kubectl", "get", "namespace", target.namespace, "--output=name"])
        # Any other error may be a missing permission to read namespaces, with which apply still works.
        if "NotFound" in found.stderr:
            raise UsageError(
                f"the namespace {target.namespace!r} does not exist; create it with "
                f"kubectl create namespace {target.namespace}, or choose another: "
                f"{option('--namespace')}=..."
            )
    for kind in kinds(target.text):
        if kind not in CUSTOM:
            continue
        resource = CUSTOM[kind]
        served = ask(["kubectl", "api-resources", f"--api-group={resource.group}", "--output=name"])
        if resource.name not in served.stdout.split():
            install = resource.install.replace("{with}", option("--with"))
            raise UsageError(f"the cluster does not know the kind {kind}: {install}")


def kubectl_json(target: Target, what: str, *more: str, selected: bool = True) -> list[Any]:
    """Return the run's objects of a kind; [] if there are none or they cannot be read."""
    select = ["--selector", target.selector] if selected else []
    done = ask(target.kubectl("get", what, *select, *more, "--output=json"))
    if done.returncode != 0 or not done.stdout.strip():
        return []
    found = json.loads(done.stdout)
    return list(found["items"]) if "items" in found else [found]


def jobs_of(target: Target) -> list[Any]:
    """Return the run's jobs of the manifest's kinds; several if other jobs have the same label."""
    return [job for kind in kinds(target.text) if kind in JOBS for job in kubectl_json(target, REMOVED[kind])]


def apply(target: Target) -> int:
    """Apply the manifest if that starts a job. Raises UsageError if something prevents it."""
    preflight(target)
    _check_queue(target)
    pods = kubectl_json(target, "pods")
    for job in jobs_of(target):
        if "deletionTimestamp" in job["metadata"]:
            continue  # its pods are reported below
        name = f"{job['kind']} {job['metadata']['name']}"
        end = job_state.outcome(job, pods)
        if end is None:
            raise UsageError(
                f"{name} exists and is still running, so apply would not change its pods; "
                f"{target.command('logs')} follows it, {target.command('delete')} ends it after a checkpoint"
            )
        raise UsageError(
            f"{name} has ended, {end}, so apply would start nothing; remove it first, its checkpoints stay: "
            f"{target.command('delete')}"
        )
    if any("deletionTimestamp" in pod["metadata"] for pod in pods):
        raise UsageError(
            f"pods of an earlier {target.name} are still ending, and a new job would meet them; wait: "
            f"kubectl wait --for=delete pod --selector {target.selector} --timeout={DELETE_SECONDS}s"
        )
    _check_claims(target)
    done = subprocess.run(target.kubectl("apply", "--filename", "-"), input=target.text, text=True)
    # cluster-runtime is no job, so it has no pods to follow.
    if done.returncode == 0 and any(kind in JOBS for kind in kinds(target.text)):
        print(
            f"follow the pods: {target.command('logs')}; "
            f"live page and metrics on this machine: {target.command('forward')}"
        )
    return done.returncode


def _check_queue(target: Target) -> None:
    if QUEUE_LABEL not in target.text:
        return
    if not ask(["kubectl", "api-resources", f"--api-group={QUEUE_GROUP}", "--output=name"]).stdout.split():
        raise UsageError(
            "the manifest waits for a queue, and the cluster has no Kueue to admit it: "
            f"kueue.sigs.k8s.io/docs/installation, or leave kueue out of {option('--with')}"
        )


def _check_claims(target: Target) -> None:
    """Raise UsageError for a change that Kubernetes would reject after applying the rest of the manifest."""
    there = {claim["metadata"]["name"]: claim for claim in kubectl_json(target, "persistentvolumeclaims")}
    if not there:
        return
    # kubectl parses the YAML, because the standard library cannot.
    command = target.kubectl("create", "--dry-run=client", "--output=json", "--filename", "-")
    done = subprocess.run(command, input=target.text, capture_output=True, text=True)
    for asked in _documents(done.stdout):
        name = asked["metadata"]["name"]
        if asked["kind"] == "PersistentVolumeClaim" and name in there:
            difference = job_state.claim_difference(asked, there[name])
            if difference:
                raise UsageError(
                    f"the claim {name} exists with {difference}; change the manifest to match it, or "
                    f"remove it with its checkpoints: {target.command('delete', purge='')}"
                )


def _documents(text: str) -> list[Any]:
    """Parse kubectl's JSON output: documents one after another, or one List."""
    decoder = json.JSONDecoder()
    found = list[Any]()
    at = 0
    while text[at:].strip():
        at += len(text[at:]) - len(text[at:].lstrip())
        document, at = decoder.raw_decode(text, at)
        found += document["items"] if document.get("kind") == "List" else [document]
    return found


def status(target: Target) -> int:
    """Print the job, pods, claims, the containers' reasons and exit codes, and warnings, newest last."""
    preflight(target)
    jobs = [REMOVED[kind] for kind in kinds(target.text) if kind in JOBS]
    what = ",".join([*jobs, "pods", "persistentvolumeclaims"])
    code = subprocess.run(
        target.kubectl("get", what, "--selector", target.selector, "--output=wide")
    ).returncode
    pods = kubectl_json(target, "pods")
    _print("containers", [line for pod in pods for line in job_state.container_lines(pod)])
    # Events carry no labels of the job, so they are selected by the names of its objects.
    own = {each["metadata"]["name"] for each in (*jobs_of(target), *pods)}
    own |= {claim["metadata"]["name"] for claim in kubectl_json(target, "persistentvolumeclaims")}
    warnings = kubectl_json(target, "events", "--field-selector=type=Warning", selected=False)
    _print("warnings", job_state.event_lines(warnings, own)[-WARNINGS:])
    for node, names in _lost_nodes(target, pods).items():
        print(f"\n{job_state.lost_node_line(node, names)}", flush=True)
    return code


def _print(title: str, lines: Sequence[str]) -> None:
    if lines:
        print("\n".join(["", title, *lines]), flush=True)


def _lost_nodes(target: Target, pods: Sequence[Any]) -> dict[str, list[str]]:
    return job_state.lost_nodes(pods, kubectl_json(target, "nodes", selected=False))


def delete(target: Target, purge: bool) -> int:
    """Delete everything of the job except its volume, and wait for its pods, which may be saving.

    Pods on a node that does not answer cannot end. They are reported, not waited for, and the exit code is 1.
    """
    preflight(target)
    pods = kubectl_json(target, "pods")
    lost = _lost_nodes(target, pods)
    stuck = {name for names in lost.values() for name in names}
    present = [REMOVED[kind] for kind in kinds(target.text) if kind in REMOVED]
    what = ",".join([*present, *(["persistentvolumeclaims"] if purge else [])])
    limit = f"--timeout={DELETE_SECONDS}s"
    # A claim waits for the pods that use it, so with a stuck pod it would wait forever.
    wait = ["--wait=false"] if stuck else ["--wait=true", limit]
    code = subprocess.run(target.kubectl("delete", what, "--selector", target.selector, *wait)).returncode
    waiting = [pod["metadata"]["name"] for pod in pods if not job_state.has_begun(pod)]
    if idle := [name for name in waiting if name not in stuck]:
        # The operator's init container is a shell that ignores SIGTERM, and it has nothing to save.
        ask(target.kubectl("delete", "pod", *idle, "--grace-period=1", "--ignore-not-found", "--wait=false"))
    ending = [f"pod/{pod['metadata']['name']}" for pod in pods if pod["metadata"]["name"] not in stuck]
    if not stuck:
        ending = ["pod", "--selector", target.selector]
    gone = subprocess.run(target.kubectl("wait", "--for=delete", *ending, limit)).returncode if ending else 0
    for node, names in lost.items():
        print(job_state.lost_node_line(node, names), flush=True)
    if not purge:
        print(
            "the volume with the checkpoints stays; the next apply resumes from it "
            f"({option('--purge')}{'=1' if option('--purge') == 'PURGE' else ''} removes it)"
        )
    return code or gone or int(bool(stuck))


def logs(target: Target) -> int:
    """Show the logs of all pods, replacements included, until the job has ended; return its exit code.

    Raises UsageError if there is no job.
    """
    preflight(target)
    followed: Followed = {}
    printed = ""
    unseen = 0
    try:
        while True:
            found = jobs_of(target)
            unseen = 0 if found else unseen + 1
            # An API server may miss a request. Before any log was shown, the job more likely does not
            # exist.
            if unseen > (MISSED if followed else 0):
                raise UsageError(f"there is no job {target.name}; start one: {target.command('apply')}")
            if unseen:
                time.sleep(POLL_SECONDS)
                continue
            pods = kubectl_json(target, "pods")
            # Pods are followed before the result is read, so that the logs of a job that has ended are shown,
            # too.
            _follow(target, pods, followed)
            if end := job_state.outcome(found[0], pods):
                _wait(followed)
                print(f"{target.name} has ended: {end}", flush=True)
                return end.code
            waiting = "" if followed else _waiting(pods)
            if waiting and waiting != printed:
                print(printed := waiting, flush=True)
            time.sleep(POLL_SECONDS)
    finally:
        for process in followed.values():
            # kubectl --follow would otherwise outlive this command.
            process.kill()
            process.wait()


def _follow(target: Target, pods: list[Any], followed: Followed) -> None:
    for pod in pods:
        name = pod["metadata"]["name"]
        for container, restarts in job_state.lives(pod):
            # The UID, because a replacement pod can have the same name.
            key = (pod["metadata"]["uid"], container, restarts)
            if key not in followed:
                command = target.kubectl("logs", name, "--container", container, "--follow", "--prefix")
                followed[key] = subprocess.Popen([*command, f"--tail={LAST_LINES}"])


def _waiting(pods: list[Any]) -> str:
    if not pods:
        return "waiting: the job has no pods yet"
    return "waiting for containers: " + "; ".join(
        line for pod in pods for line in job_state.container_lines(pod)
    )


def _wait(followed: Followed) -> None:
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    for process in followed.values():
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return  # the log of a lost node never closes


def forward(target: Target, port: int = PORT) -> int:
    """Forward a local port to node 0's live page and metrics, until Ctrl-C.

    Raises UsageError if there is no job or no metrics Service.
    """
    preflight(target)
    if not jobs_of(target):
        raise UsageError(f"there is no job {target.name}; start one: {target.command('apply')}")
    found = [each["metadata"]["name"] for each in kubectl_json(target, REMOVED["Service"])]
    service = f"{target.name}-metrics"
    if service not in found:
        raise UsageError(
            f"the namespace has no Service {service}; older manifests lack it: kubectl port-forward "
            f"POD {port}:{PORT} with the name of node 0's pod"
        )
    print(f"live page: http://localhost:{port}/  metrics: http://localhost:{port}/metrics", flush=True)
    print("Ctrl-C ends it", file=sys.stderr, flush=True)
    try:
        command = target.kubectl("port-forward", f"service/{service}", f"{port}:{PORT}")
        return subprocess.run(command).returncode
    # Ctrl-C is the usual way to end it.
    except KeyboardInterrupt:
        return 0
