"""Rules beyond schemas: nine mistakes that pass every schema but break a PyTorchJob, and tandem's rules.

Sources: the defaulting and pod creation of training operator 1.9, Kubernetes' documentation of Jobs, and
tandem's exit codes (docs/troubleshooting.md). Each rule takes all documents of a manifest and yields one
line per problem.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tandem.config.sources import OTHER_VARIABLES, VARIABLES
from tandem.schedule import in_seconds
from tandem.text import did_you_mean, nearest
from tandem_k8s.documents import Document, PodTemplate, job_specs, pod_templates, title

Problems = Iterator[str]
Rule = Callable[[list[Document]], Problems]

RESTART_POLICIES = ("Always", "OnFailure", "Never", "ExitCode")
CLEAN_POD_POLICIES = ("All", "Running", "None")
MANAGERS = ("kubeflow.org/training-operator", "kueue.x-k8s.io/multikueue")
ROLES = ("Master", "Worker")
NOT_RETRIED = (1, 2)  # the task's own error, configuration
RETRIED = (137, 143, 200)  # killed, stopped with a checkpoint, peer lost
LEAVE_SECONDS = 15  # for the agent after its ranks: notify the other nodes, write the last page
LABELS = tuple(
    f"app.kubernetes.io/{name}"
    for name in ("name", "instance", "component", "part-of", "version", "managed-by")
)
OF_A_RUN = "app.kubernetes.io/instance"
"""Not a label of a ClusterTrainingRuntime, which serves all runs."""
NAME = r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?"
LABEL_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{NAME}")
LABEL_VALUE = re.compile(rf"({NAME})?")
GPU = "nvidia.com/gpu"


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)


def _jobs(documents: list[Document]) -> Iterator[Document]:
    return (document for document in documents if document.get("kind") == "PyTorchJob")


def _replicas(job: Document) -> Mapping[str, Document]:
    return job["spec"].get("pytorchReplicaSpecs") or {}


def _templates(documents: list[Document]) -> Iterator[PodTemplate]:
    return (each for document in documents for each in pod_templates(document))


# The nine mistakes that the API server and the operator accept.


def restart_policy(documents: list[Document]) -> Problems:
    """A typo in a replica's restartPolicy acts like Never; tandem's exit codes are designed for ExitCode."""
    for job in _jobs(documents):
        for role, replica in _replicas(job).items():
            policy = replica.get("restartPolicy")
            if policy not in RESTART_POLICIES:
                yield (
                    f"{title(job)} {role}: restartPolicy: invalid value {policy!r}; "
                    f"expected one of {_list(RESTART_POLICIES)}"
                )
            elif policy != "ExitCode":
                yield f"{title(job)} {role}: restartPolicy {policy} ignores exit codes; use ExitCode"


def clean_pod_policy(documents: list[Document]) -> Problems:
    """The operator treats a typo as All and deletes the pods with their logs."""
    for job in _jobs(documents):
        policy = (job["spec"].get("runPolicy") or {}).get("cleanPodPolicy")
        if policy not in CLEAN_POD_POLICIES:
            yield (
                f"{title(job)}: cleanPodPolicy: invalid value {policy!r}; "
                f"expected one of {_list(CLEAN_POD_POLICIES)}"
            )
        elif policy != "Running":
            yield f"{title(job)}: cleanPodPolicy {policy}; Running keeps the logs and frees what still runs"


def replica_keys(documents: list[Document]) -> Problems:
    for job in _jobs(documents):
        for role in set(_replicas(job)) - set(ROLES):
            yield f"{title(job)}: replica {role!r} is ignored; expected {' or '.join(ROLES)}"


def container_name(documents: list[Document]) -> Problems:
    """The operator (and Trainer, with `node`) sets variables by the container's name."""
    for each in _templates(documents):
        if not each.container():
            yield f"{each.where}: no container is named {each.main!r}; it would get no addresses"


def master_is_present(documents: list[Document]) -> Problems:
    """Without a Master and without elasticPolicy, workers get no address at all."""
    for job in _jobs(documents):
        if "Master" not in _replicas(job) and "elasticPolicy" not in job["spec"]:
            yield f"{title(job)}: no Master and no elasticPolicy: workers would get no address"


def one_master(documents: list[Document]) -> Problems:
    for job in _jobs(documents):
        master = _replicas(job).get("Master")
        if master is not None and master.get("replicas") != 1:
            yield f"{title(job)}: Master.replicas is {master.get('replicas')!r}; write replicas: 1"


def managed_by(documents: list[Document]) -> Problems:
    for job in _jobs(documents):
        manager = (job["spec"].get("runPolicy") or {}).get("managedBy")
        if manager is not None and manager not in MANAGERS:
            yield f"{title(job)}: managedBy: invalid value {manager!r}; expected {' or '.join(MANAGERS)}"


def mounts_have_volumes(documents: list[Document]) -> Problems:
    for each in _templates(documents):
        volumes = {volume.get("name") for volume in each.spec.get("volumes", [])}
        for container in each.containers():
            for mount in container.get("volumeMounts", []):
                if mount.get("name") not in volumes:
                    yield f"{each.where}: volumeMount {mount.get('name')!r} has no volume of that name"


def unique_ports(documents: list[Document]) -> Problems:
    """The operator copies all ports into one Service, where names must differ."""
    for each in _templates(documents):
        ports = [port for container in each.containers() for port in container.get("ports", [])]
        for key in ("name", "containerPort"):
            values = [port.get(key) for port in ports]
            for value in sorted({str(value) for value in values if values.count(value) > 1}):
                yield f"{each.where}: port {key} {value} is given twice"


NINE: tuple[Rule, ...] = (
    restart_policy, clean_pod_policy, replica_keys, container_name, master_is_present, one_master, managed_by,
    mounts_have_volumes, unique_ports,
)  # fmt: skip


# tandem's own.


def bounded(documents: list[Document]) -> Problems:
    """Retries are limited, and finished jobs are removed."""
    for document in documents:
        if document.get("kind") in ("PyTorchJob", "Job"):
            policy = document["spec"].get("runPolicy") or document["spec"]
            for field in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
                if not policy.get(field):
                    yield f"{title(document)}: {field} is missing"


def rendezvous_port(documents: list[Document]) -> Problems:
    """MASTER_PORT comes from the port of this name."""
    for document in _jobs(documents):
        for each in pod_templates(document):
            names = [port.get("name") for port in each.container().get("ports", [])]
            for name in {"pytorchjob-port", "metrics"} - set(names):
                yield f"{each.where}: no port is named {name}"


def shutdown_fits(documents: list[Document]) -> Problems:
    """Save time < shutdown timeout < grace period, which ends with SIGKILL."""
    for each in _templates(documents):
        grace = each.spec.get("terminationGracePeriodSeconds", 30)
        shutdown = float(in_seconds(each.values().get("TANDEM_SHUTDOWN_TIMEOUT", 25)))
        if shutdown + LEAVE_SECONDS > grace:
            yield (
                f"{each.where}: terminationGracePeriodSeconds {grace} is too short for "
                f"TANDEM_SHUTDOWN_TIMEOUT {shutdown:g}; give at least {shutdown + LEAVE_SECONDS:g}"
            )


def probes(documents: list[Document]) -> Problems:
    """Probes check progress; readiness must not wait for a rendezvous that waits for readiness."""
    for each in _templates(documents):
        container = each.container()
        if "readinessProbe" in container:
            yield f"{each.where}: a readinessProbe keeps the master's name from resolving until it is ready"
        for probe in ("startupProbe", "livenessProbe"):
            command = (container.get(probe) or {}).get("exec", {}).get("command")
            if command != ["tandem", "health"]:
                yield f"{each.where}: {probe} must run `tandem health`, not {command}"
        if "TANDEM_STATE_DIR" not in each.values():
            yield f"{each.where}: TANDEM_STATE_DIR is not set: `tandem health` would find no heartbeat"


def known_variables(documents: list[Document]) -> Problems:
    """tandem exits with 2 if it does not know a TANDEM_ variable."""
    known = {*VARIABLES, *OTHER_VARIABLES}
    for each in _templates(documents):
        for entry in each.container().get("env", []):
            name = entry.get("name", "")
            if name.startswith("TANDEM_") and name not in known and not name.startswith("TANDEM_TASK__"):
                yield f"{each.where}: unknown variable {name}{did_you_mean(nearest(name, known))}"


def run_dir_is_shared(documents: list[Document]) -> Problems:
    """Checkpoints in a container's own file system are lost with it."""
    for each in _templates(documents):
        claims = {one["name"] for one in each.spec.get("volumes", []) if "persistentVolumeClaim" in one}
        mounts = [one["mountPath"] for one in each.mounts() if one.get("name") in claims]
        run_dir = each.values().get("TANDEM_RUN_DIR", "")
        if not any(run_dir.startswith(mount.rstrip("/") + "/") for mount in mounts):
            yield f"{each.where}: TANDEM_RUN_DIR {run_dir!r} is not on a persistentVolumeClaim ({mounts})"


def claims_exist(documents: list[Document]) -> Problems:
    own = {d["metadata"]["name"] for d in documents if d.get("kind") == "PersistentVolumeClaim"}
    if any(document.get("kind") == "ClusterTrainingRuntime" for document in documents):
        return  # each namespace has its own claim
    for each in _templates(documents):
        for volume in each.spec.get("volumes", []):
            claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
            if claim is not None and claim not in own:
                yield f"{each.where}: claim {claim} is not in this manifest ({', '.join(sorted(own))})"


def shared_memory(documents: list[Document]) -> Problems:
    for each in _templates(documents):
        memory = {
            volume["name"]
            for volume in each.spec.get("volumes", [])
            if (volume.get("emptyDir") or {}).get("medium") == "Memory"
        }
        mounted = {one.get("name") for one in each.mounts() if one.get("mountPath") == "/dev/shm"}
        if not mounted & memory:
            yield f"{each.where}: /dev/shm is no emptyDir with medium: Memory; NCCL would get 64 MiB"


def resources(documents: list[Document]) -> Problems:
    """Requests and limits must be set, and TANDEM_THREADS must fit the CPU limit."""
    for each in _templates(documents):
        stated = each.container().get("resources") or {}
        for kind in ("requests", "limits"):
            for name in ("cpu", "memory", "ephemeral-storage"):
                if name not in (stated.get(kind) or {}):
                    yield f"{each.where}: resources.{kind}.{name} is missing"
        threads, cpus = int(each.values().get("TANDEM_THREADS", "1")), _cpus(stated)
        if cpus is not None and threads > max(1.0, cpus):
            yield f"{each.where}: TANDEM_THREADS {threads} is more than the CPU limit {cpus:g}: throttled"


def _cpus(stated: Mapping[str, Any]) -> float | None:
    text = str((stated.get("limits") or {}).get("cpu", ""))
    try:
        return float(text[:-1]) / 1000 if text.endswith("m") else float(text)
    except ValueError:
        return None


def gpus_fit_ranks(documents: list[Document]) -> Problems:
    """Both roles request the same number of GPUs, which is nprocPerNode; with 0, ranks run on the CPU."""
    for job in _jobs(documents):
        counts = {
            each.where: str((each.container().get("resources") or {}).get("limits", {}).get(GPU, "0"))
            for each in pod_templates(job)
        }
        if len(set(counts.values())) > 1:
            yield f"{title(job)}: roles ask for different numbers of {GPU}: {counts}"
        for where, count in counts.items():
            if count not in ("0", str(job["spec"].get("nprocPerNode"))):
                yield f"{where}: {GPU} {count} but nprocPerNode {job['spec'].get('nprocPerNode')!r}"


def selectors_match(documents: list[Document]) -> Problems:
    """Selectors of NetworkPolicy, Service, PodMonitor and topology spread must find the job's pods."""
    pods = list(_templates(documents))
    for document in documents:
        kind, spec = document.get("kind"), document.get("spec") or {}
        if kind not in ("NetworkPolicy", "PodMonitor", "Service"):
            continue
        selector = spec.get("podSelector" if kind == "NetworkPolicy" else "selector") or {}
        wanted = selector if kind == "Service" else selector.get("matchLabels") or {}
        found = [each for each in pods if wanted and wanted.items() <= each.labels.items()]
        if not found:
            yield f"{title(document)}: its selector {wanted} finds none of the pods"
        elif kind == "NetworkPolicy" and len(found) != len(pods):
            yield f"{title(document)}: its selector {wanted} does not find all pods"
    for each in pods:
        for spread in each.spec.get("topologySpreadConstraints", []):
            wanted = (spread.get("labelSelector") or {}).get("matchLabels") or {}
            if not wanted or not wanted.items() <= each.labels.items():
                yield f"{each.where}: topologySpreadConstraints select {wanted}, which is not this pod"
            if spread.get("whenUnsatisfiable") != "ScheduleAnyway":
                yield f"{each.where}: a spread that is required keeps small clusters from running the job"


def pods_reach_each_other(documents: list[Document]) -> Problems:
    """gloo and NCCL listen on random ports, so all are open between the job's pods. Policies add up."""
    policies = [document["spec"] for document in documents if document.get("kind") == "NetworkPolicy"]
    if not policies and any(document.get("kind") != "ClusterTrainingRuntime" for document in documents):
        yield "no NetworkPolicy"
    for direction, peers in (("ingress", "from"), ("egress", "to")):
        applied = [spec for spec in policies if direction.title() in spec.get("policyTypes", [])]
        if applied and not any(
            {"podSelector": spec.get("podSelector")} in rule.get(peers, []) and "ports" not in rule
            for spec in applied
            for rule in spec.get(direction, [])
        ):
            yield f"NetworkPolicy: {direction} does not open all ports among the job's pods"
    rules = [rule for spec in policies for rule in spec.get("egress", [])]
    if policies and 53 not in [port.get("port") for rule in rules for port in rule.get("ports", [])]:
        yield "NetworkPolicy: egress does not open port 53: no name would resolve"


def node_counts_agree(documents: list[Document]) -> Problems:
    """completions, parallelism and the pods' variable must agree; otherwise pods would wait forever."""
    for document in documents:
        for where, spec in job_specs(document):
            template = next((each for each in pod_templates(document) if each.spec), None)
            values = template.values() if template else {}
            counts: dict[str, str] = {
                name: str(spec[name]) for name in ("completions", "parallelism") if name in spec
            }
            counts |= {name: values[name] for name in ("NNODES", "NODES") if name in values}
            if len(set(counts.values())) > 1:
                yield f"{where}: {', '.join(f'{k}={v}' for k, v in counts.items())} must be equal"
            if document.get("kind") in ("Job", "JobSet") and spec.get("completionMode") != "Indexed":
                yield f"{where}: completionMode must be Indexed: pods need an index and a name"


def job_pods(documents: list[Document]) -> Problems:
    """A Job's pods are replaced, not restarted in place, and two pods never have the same index."""
    for document in documents:
        for where, spec in job_specs(document):
            if ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy") != "Never":
                yield f"{where}: restartPolicy must be Never: podFailurePolicy sees pods, not containers"
            if spec.get("podReplacementPolicy") != "Failed":
                yield f"{where}: podReplacementPolicy must be Failed: two pods of index 0 would both write"


def failure_policy(documents: list[Document]) -> Problems:
    """Permanent exit codes fail the job; for the others the pod is recreated, up to a limit.

    Drains do not count toward the limit; crashes and lost peers do.
    """
    for document in documents:
        for where, spec in job_specs(document):
            for code in (*NOT_RETRIED, *RETRIED):
                action = action_for(spec, code)
                if (action == "FailJob") != (code in NOT_RETRIED):
                    yield f"{where}: podFailurePolicy answers exit code {code} with {action}"
            if action_for(spec, 143) != "Ignore" or action_for(spec, 137, disrupted=True) != "Ignore":
                yield f"{where}: podFailurePolicy counts a drained pod as a failure"
            for code in (137, 200):
                if action_for(spec, code) == "Ignore":
                    yield f"{where}: podFailurePolicy ignores exit code {code}: such a job would never end"
            pod = (spec.get("template") or {}).get("spec") or {}
            names = [container.get("name") for container in pod.get("containers", [])]
            for rule in (spec.get("podFailurePolicy") or {}).get("rules", []):
                name = (rule.get("onExitCodes") or {}).get("containerName")
                if name is not None and name not in names:
                    yield f"{where}: podFailurePolicy looks at container {name!r}; there are {names}"


def waits_of_its_own(documents: list[Document]) -> Problems:
    """A Job's delay before a new pod grows with every failure, even ignored ones, so count them for each pod.

    A Job of a JobSet with backoffLimit 0 is recreated as a whole, which resets all counts.
    """
    for document in documents:
        if document.get("kind") == "Job":
            spec, where = document["spec"], title(document)
            if not spec.get("backoffLimitPerIndex"):
                yield f"{where}: without backoffLimitPerIndex each pod waits for the failures of all pods"
            elif spec.get("maxFailedIndexes") != 0:
                yield f"{where}: maxFailedIndexes must be 0: the others would wait for a pod given up"
            if "backoffLimit" in spec:
                yield f"{where}: backoffLimit counts all pods; drop it for backoffLimitPerIndex"


def action_for(spec: Mapping[str, Any], code: int, *, disrupted: bool = False) -> str:
    """Return a Job's action for a pod that exited with `code`: its first matching podFailurePolicy rule."""
    for rule in (spec.get("podFailurePolicy") or {}).get("rules", []):
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes and code != 0 and (code in codes.get("values", [])) == (codes.get("operator") == "In"):
            return str(rule.get("action"))
        if disrupted and any(condition.get("type") == "DisruptionTarget" for condition in conditions):
            return str(rule.get("action"))
    return "Count"


def headless_service(documents: list[Document]) -> Problems:
    """An Indexed Job's pods get names only from a headless Service that is their subdomain."""
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d.get("kind") == "Service"}
    for document in documents:
        if document.get("kind") != "Job":
            continue
        template = next(pod_templates(document))
        subdomain, name = template.spec.get("subdomain"), document["metadata"]["name"]
        service = services.get(str(subdomain), {})
        if service.get("clusterIP") != "None" or not service.get("publishNotReadyAddresses"):
            yield (
                f"{title(document)}: subdomain {subdomain!r} needs a Service with clusterIP: None and "
                "publishNotReadyAddresses: true"
            )
        master = template.values().get("MASTER_ADDR")
        if master != f"{name}-0.{subdomain}":
            yield f"{title(document)}: MASTER_ADDR is {master!r}, index 0 is {name}-0.{subdomain}"


def labeled(documents: list[Document]) -> Problems:
    for document in documents:
        labels = (document.get("metadata") or {}).get("labels") or {}
        for name in LABELS:
            is_shared = document.get("kind") == "ClusterTrainingRuntime" and name == OF_A_RUN
            if name not in labels and not is_shared:
                yield f"{title(document)}: label {name} is missing"


def labels_are_valid(documents: list[Document]) -> Problems:
    """The API server rejects invalid labels at once, but those of pods only when the pods are created."""
    for document in documents:
        holders = [
            (title(document), document),
            *((each.where, each.template) for each in pod_templates(document)),
        ]
        for where, holder in holders:
            for key, value in ((holder.get("metadata") or {}).get("labels") or {}).items():
                if not LABEL_KEY.fullmatch(str(key)):
                    yield f"{where}: label {key!r}: invalid name; expected [PREFIX/]NAME"
                elif not isinstance(value, str):
                    yield f"{where}: label {key}: invalid value {value!r}; expected text, in quotes"
                elif not LABEL_VALUE.fullmatch(value):
                    yield (
                        f"{where}: label {key}: invalid value {value!r}; expected at most 63 letters, digits "
                        "and -_., a letter or digit at both ends"
                    )


def images_are_fixed(documents: list[Document]) -> Problems:
    """Pods that are created later must run the same code: no :latest, and no image without a tag."""
    for each in _templates(documents):
        for container in each.containers():
            yield from _image(f"{each.where}: container {container.get('name')}", container.get("image"))
    for document in documents:
        if document.get("kind") == "TrainJob" and "image" in (document["spec"].get("trainer") or {}):
            yield from _image(f"{title(document)}: trainer", document["spec"]["trainer"]["image"])


def _image(where: str, image: object) -> Problems:
    name, _, digest = str(image or "").partition("@")
    tag = name.rpartition("/")[2].partition(":")[2]
    if not digest and tag in ("", "latest"):
        yield f"{where}: image: invalid value {image!r}; expected a tag other than latest, or a digest"


def variables_once(documents: list[Document]) -> Problems:
    """If two variables have the same name, the last one wins, and some clients drop either."""
    for each in _templates(documents):
        for container in each.containers():
            names = [entry.get("name") for entry in container.get("env", [])]
            for name in sorted({str(name) for name in names if names.count(name) > 1}):
                where = f"{each.where}: container {container.get('name')}"
                yield f"{where}: variable {name} is set more than once"


def trainjob_has_its_runtime(documents: list[Document]) -> Problems:
    runtimes = [d["metadata"]["name"] for d in documents if d.get("kind") == "TrainingRuntime"]
    for document in documents:
        reference = (document.get("spec") or {}).get("runtimeRef") or {}
        if reference.get("kind") == "TrainingRuntime" and reference.get("name") not in runtimes:
            yield f"{title(document)}: runtime {reference['name']!r} is not in this manifest ({runtimes})"


def scripts_are_there(documents: list[Document]) -> Problems:
    """A path in args below a ConfigMap's mount must be one of its files; other paths are in the image."""
    maps = {d["metadata"]["name"]: d.get("data") or {} for d in documents if d.get("kind") == "ConfigMap"}
    for each in _templates(documents):
        volumes = each.spec.get("volumes", [])
        names = {volume["name"]: (volume.get("configMap") or {}).get("name") for volume in volumes}
        folders = {one["mountPath"].rstrip("/"): names.get(one.get("name")) for one in each.mounts()}
        for word in each.container().get("args", []):
            folder, _, file = str(word).rpartition("/")
            if folders.get(folder) in maps and file not in maps[str(folders[folder])]:
                there = _list(sorted(maps[str(folders[folder])])) or "nothing"
                yield f"{each.where}: args name {word}, and ConfigMap {folders[folder]} has {there}"


OWN: tuple[Rule, ...] = (
    bounded, rendezvous_port, shutdown_fits, probes, known_variables, run_dir_is_shared, claims_exist,
    shared_memory, resources, gpus_fit_ranks, selectors_match, pods_reach_each_other, node_counts_agree,
    job_pods, failure_policy, waits_of_its_own, headless_service, labeled, labels_are_valid,
    images_are_fixed, variables_once, trainjob_has_its_runtime, scripts_are_there,
)  # fmt: skip
