"""Deliberate mistakes: one value of one manifest changed, and a word that the complaint has to contain.

A place is written as the document's kind and a path: names between dots, `[name]` for the entry of that name
(or number) in a list and for keys with dots. DROP takes the value away, Rename moves it to another key.
"""

import copy
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from tandem_k8s.documents import Document, find

WORKER = "PyTorchJob spec.pytorchReplicaSpecs.Worker"
POD = f"{WORKER}.template.spec"
MAIN = f"{POD}.containers[pytorch]"
RUN = "PyTorchJob spec.runPolicy"
CHILD = "JobSet spec.replicatedJobs[node].template.spec"
TASK = "Job spec.template.spec"
RUNTIME = "TrainingRuntime spec.template.spec.replicatedJobs[node].template.spec"
LABEL = "[training.kubeflow.org/job-name]"

DROP = object()


@dataclass(frozen=True)
class Rename:
    to: str


class Mistake(NamedTuple):
    what: str
    manifest: str
    place: str
    value: Any
    word: str

    def made_in(self, documents: list[Document]) -> None:
        """Spoil these documents, after every shared part of the YAML has become a part of its own."""
        for index, document in enumerate(documents):
            documents[index] = _unshared(document)
        kind, path = self.place.split(" ", 1)
        steps = [step.strip("[]") for step in re.findall(r"\[[^\]]*\]|[^.\[\]]+", path)]
        holder: Any = find(documents, kind)
        for step in steps[:-1]:
            holder = holder[_key(holder, step)]
        key = _key(holder, steps[-1])
        if self.value is DROP:
            holder.pop(key)
        elif isinstance(self.value, Rename):
            holder[self.value.to] = holder.pop(key)
        else:
            holder[key] = self.value


def _key(holder: Any, step: str) -> Any:
    if isinstance(holder, dict):
        return step
    if step.isdigit():
        return int(step)
    return next(index for index, one in enumerate(holder) if one["name"] == step)


def _unshared(value: Any) -> Any:
    """A deep copy in which YAML's anchors are copies too (`copy.deepcopy` keeps them shared)."""
    if isinstance(value, dict):
        return {key: _unshared(one) for key, one in value.items()}
    return [_unshared(one) for one in value] if isinstance(value, list) else copy.copy(value)


NINE = [  # no schema knows these
    Mistake("restartPolicy misspelt", "pytorchjob", f"{WORKER}.restartPolicy", "Exitcode", "Exitcode"),
    Mistake("cleanPodPolicy misspelt", "pytorchjob", f"{RUN}.cleanPodPolicy", "running", "cleanPodPolicy"),
    Mistake("a role in lower case", "pytorchjob", WORKER, Rename("worker"), "'worker'"),
    Mistake("container named otherwise", "pytorchjob", f"{MAIN}.name", "trainer", "'pytorch'"),
    Mistake("no Master", "pytorchjob", "PyTorchJob spec.pytorchReplicaSpecs.Master", DROP, "no Master"),
    Mistake(
        "two Masters",
        "pytorchjob",
        "PyTorchJob spec.pytorchReplicaSpecs.Master.replicas",
        2,
        "Master.replicas",
    ),
    Mistake("managedBy nobody", "pytorchjob", f"{RUN}.managedBy", "kubeflow", "managedBy"),
    Mistake("a mount without volume", "pytorchjob", f"{MAIN}.volumeMounts[data].name", "date", "no volume"),
    Mistake(
        "one port name twice", "pytorchjob", f"{MAIN}.ports[metrics].name", "pytorchjob-port", "given twice"
    ),
]
SCHEMA = [
    Mistake("a field misspelt", "pytorchjob", f"{RUN}.ttlSecondsAfterFinish", 1, "ttlSecondsAfterFinish"),
    Mistake("nprocPerNode a number", "pytorchjob", "PyTorchJob spec.nprocPerNode", 2, "nprocPerNode"),
    Mistake("replicas as text", "pytorchjob", f"{WORKER}.replicas", "2", "replicas"),
    Mistake("env as a mapping", "pytorchjob", f"{MAIN}.env", {"A": "b"}, "env"),
    Mistake("an env value that is no text", "pytorchjob", f"{MAIN}.env[HOME].value", 2, "value"),
    Mistake("replica specs misspelt", "pytorchjob", "PyTorchJob spec.pytorchReplicaSpecs",
            Rename("pyTorchReplicaSpecs"), "pyTorchReplicaSpecs"),
    Mistake("an old API", "pytorchjob", "PyTorchJob apiVersion", "kubeflow.org/v1beta1", "apiVersion"),
    Mistake("image under a wrong key", "pytorchjob", f"{MAIN}.image", Rename("imageName"), "imageName"),
    Mistake("a name that DNS refuses", "pytorchjob", "PyTorchJob metadata.name", "Tandem_1", "Tandem_1"),
    Mistake("access modes as text", "pytorchjob", "PersistentVolumeClaim spec.accessModes", "ReadWriteMany",
            "accessModes"),
    Mistake("completionMode in the pod", "indexed-job", f"{TASK}.completionMode", "Indexed", "completionMode"),
    Mistake("completions beside the child job", "jobset", "JobSet spec.replicatedJobs[node].completions", 3,
            "completions"),
    Mistake("numNodes as text", "trainjob", "TrainJob spec.trainer.numNodes", "3", "numNodes"),
    Mistake("a runtime without template", "trainjob", "TrainingRuntime spec.template", DROP, "template"),
    Mistake("endpoints of a ServiceMonitor", "monitoring", "PodMonitor spec.podMetricsEndpoints",
            Rename("endpoints"), "endpoints"),
]  # fmt: skip
SECURITY = [
    Mistake("root", "pytorchjob", f"{POD}.securityContext.runAsUser", 0, "runAsUser is 0"),
    Mistake("runAsNonRoot left out", "pytorchjob", f"{POD}.securityContext.runAsNonRoot", DROP, "runAsNonRoot"),
    Mistake("privilege escalation", "pytorchjob", f"{MAIN}.securityContext.allowPrivilegeEscalation", DROP,
            "allowPrivilegeEscalation"),
    Mistake("a capability for RDMA", "rdma", f"{MAIN}.securityContext.capabilities.add", ["IPC_LOCK"], "IPC_LOCK"),
    Mistake("capabilities kept", "indexed-job", f"{TASK}.containers[tandem].securityContext.capabilities", DROP,
            "capabilities.drop"),
    Mistake("no seccomp", "pytorchjob", f"{POD}.securityContext.seccompProfile", DROP, "seccompProfile"),
    Mistake("a writable root", "pytorchjob", f"{MAIN}.securityContext.readOnlyRootFilesystem", False,
            "readOnlyRootFilesystem"),
    Mistake("the host's network", "pytorchjob", f"{POD}.hostNetwork", True, "hostNetwork"),
    Mistake("a directory of the host", "pytorchjob", f"{POD}.volumes[1]",
            {"name": "data", "hostPath": {"path": "/"}}, "hostPath"),
    Mistake("the account's token", "pytorchjob", f"{POD}.automountServiceAccountToken", DROP,
            "automountServiceAccountToken"),
]  # fmt: skip
CONTRACT = [
    Mistake("a short grace period", "pytorchjob", f"{POD}.terminationGracePeriodSeconds", 30, "at least 105"),
    Mistake("a readiness probe", "pytorchjob", f"{MAIN}.readinessProbe", {"exec": {"command": ["true"]}},
            "readinessProbe"),
    Mistake("a probe of a port", "pytorchjob", f"{MAIN}.livenessProbe", {"tcpSocket": {"port": 19469}},
            "livenessProbe"),
    Mistake("a variable misspelt", "pytorchjob", f"{MAIN}.env[TANDEM_THREADS].name", "TANDEM_THREAD",
            "did you mean TANDEM_THREADS?"),
    Mistake("checkpoints in the container", "pytorchjob", f"{MAIN}.env[TANDEM_RUN_DIR].value", "/tmp/run",
            "TANDEM_RUN_DIR"),
    Mistake("another claim", "pytorchjob", f"{POD}.volumes[checkpoints].persistentVolumeClaim.claimName",
            "tandem", "claim tandem"),
    Mistake("shared memory on disk", "pytorchjob", f"{POD}.volumes[shm].emptyDir.medium", DROP, "/dev/shm"),
    Mistake("no memory limit", "pytorchjob", f"{MAIN}.resources.limits.memory", DROP, "limits.memory"),
    Mistake("threads beyond the CPUs", "pytorchjob", f"{MAIN}.env[TANDEM_THREADS].value", "8",
            "TANDEM_THREADS 8"),
    Mistake("no deadline", "pytorchjob", f"{RUN}.activeDeadlineSeconds", DROP, "activeDeadlineSeconds"),
    Mistake("OnFailure", "pytorchjob", f"{WORKER}.restartPolicy", "OnFailure", "OnFailure"),
    Mistake("no rendezvous port", "pytorchjob", f"{MAIN}.ports[pytorchjob-port].name", "rendezvous",
            "pytorchjob-port"),
    Mistake("GPUs in one role", "gpu", f"{MAIN}.resources.limits[nvidia.com/gpu]", DROP, "different numbers"),
    Mistake("more GPUs than ranks", "gpu", f"{MAIN}.resources.limits[nvidia.com/gpu]", "8", "nprocPerNode"),
    Mistake("a policy for other pods", "pytorchjob", f"NetworkPolicy spec.podSelector.matchLabels{LABEL}", "x",
            "finds none"),
    Mistake("one port among the pods", "pytorchjob", "NetworkPolicy spec.ingress[0].ports", [{"port": 23456}],
            "all ports"),
    Mistake("no DNS", "pytorchjob", "NetworkPolicy spec.egress[1]", DROP, "port 53"),
    Mistake("a spread of other pods", "pytorchjob",
            f"{POD}.topologySpreadConstraints[0].labelSelector.matchLabels{LABEL}", "x", "not this pod"),
    Mistake("fewer pods than nodes", "indexed-job", "Job spec.parallelism", 2, "must be equal"),
    Mistake("NODES not raised", "jobset", f"{CHILD}.completions", 4, "must be equal"),
    Mistake("pods without index", "jobset", f"{CHILD}.completionMode", DROP, "completionMode"),
    Mistake("drains that count", "indexed-job", "Job spec.podFailurePolicy.rules[0]", DROP, "drained"),
    Mistake("a lost peer fails the job", "indexed-job",
            "Job spec.podFailurePolicy.rules[2].onExitCodes.values", [137, 143], "200 with FailJob"),
    Mistake("a lost peer that is ignored", "indexed-job",
            "Job spec.podFailurePolicy.rules[1].onExitCodes.values", [143, 200], "ignores exit code 200"),
    Mistake("pods that wait for each other's failures", "indexed-job", "Job spec.backoffLimitPerIndex", DROP,
            "waits for the failures of all pods"),
    Mistake("a limit of all pods", "indexed-job", "Job spec.backoffLimit", 60, "drop it for backoffLimitPerIndex"),
    Mistake("a job that goes on without a pod", "indexed-job", "Job spec.maxFailedIndexes", DROP,
            "maxFailedIndexes must be 0"),
    Mistake("configuration errors retried", "jobset", f"{CHILD}.podFailurePolicy.rules[2]", DROP,
            "exit code 2 with Count"),
    Mistake("codes of another container", "trainjob",
            f"{RUNTIME}.podFailurePolicy.rules[1].onExitCodes.containerName", "tandem", "there are ['node']"),
    Mistake("a restart in place", "indexed-job", f"{TASK}.restartPolicy", "OnFailure", "must be Never"),
    Mistake("a service with an address", "indexed-job", "Service spec.clusterIP", DROP, "clusterIP: None"),
    Mistake("the wrong index 0", "indexed-job", f"{TASK}.containers[tandem].env[MASTER_ADDR].value",
            "tandem-1.tandem", "index 0 is tandem-0.tandem"),
    Mistake("two pods of one index", "jobset", f"{CHILD}.podReplacementPolicy", DROP, "podReplacementPolicy"),
    Mistake("Trainer's container misnamed", "trainjob", f"{RUNTIME}.template.spec.containers[node].name",
            "trainer", "'node'"),
    Mistake("a runtime that is not there", "trainjob", "TrainJob spec.runtimeRef.name", "torch",
            "runtime 'torch'"),
    Mistake("PodMonitor of pods that serve nothing", "monitoring",
            "PodMonitor spec.selector.matchLabels[training.kubeflow.org/job-role]", "worker", "finds none"),
    Mistake("a script that is not mounted", "script", f"{MAIN}.args[0]", "/script/trian.py",
            "ConfigMap tandem-script has train.py"),
    Mistake("the newest image", "pytorchjob", f"{MAIN}.image", "tandem:latest", "other than latest"),
    Mistake("an image without a tag", "jobset", f"{CHILD}.template.spec.containers[tandem].image",
            "registry.example:5000/tandem", "other than latest"),
    Mistake("a TrainJob's newest image", "trainjob", "TrainJob spec.trainer.image", "tandem:latest",
            "other than latest"),
    Mistake("a label that is refused", "pytorchjob", "PyTorchJob metadata.labels[team]", "a b", "label team"),
    Mistake("a pod's label that is no text", "pytorchjob",
            "PyTorchJob spec.pytorchReplicaSpecs.Worker.template.metadata.labels[v]", 1, "label v"),
    Mistake("a label's name", "indexed-job", "Job metadata.labels[a/b/c]", "x", "invalid name"),
    Mistake("a variable twice", "pytorchjob", f"{MAIN}.env[HOME].name", "TANDEM_THREADS", "more than once"),
    Mistake("no room on disk", "jobset", f"{CHILD}.template.spec.containers[tandem].resources.requests[ephemeral-storage]",
            DROP, "requests.ephemeral-storage"),
    Mistake("no instance label", "pytorchjob", "PyTorchJob metadata.labels[app.kubernetes.io/instance]", DROP,
            "app.kubernetes.io/instance"),
]  # fmt: skip
MISTAKES = [*NINE, *SCHEMA, *SECURITY, *CONTRACT]
