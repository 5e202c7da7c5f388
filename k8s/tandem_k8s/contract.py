"""Derive a job's pods from its manifest: the names, addresses and exact environment of each.

The rules are those of the controllers, from their sources and from running clusters (training operator 1.9,
Trainer 2, JobSet, Kubernetes' Job controller). tests/k8s compares the result with environments captured from
real pods, and runs the manifest's command with it.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tandem_k8s.documents import COMPLETION_INDEX, Document, PodTemplate, find, jobset_spec, pod_templates

DEFAULT_PORT_OF_PYTORCHJOB = 23456
DEFAULT_PORT_OF_TRAINER = 29500


@dataclass(frozen=True)
class PodPlan:
    """One pod that a controller creates. Other pods can resolve `names`; `environment` is the main
    container's complete environment, without the image's variables."""

    name: str
    names: tuple[str, ...]
    index: int
    role: str
    environment: Mapping[str, str]
    command: tuple[str, ...]
    template: PodTemplate = field(repr=False)


def plan(documents: list[Document]) -> list[PodPlan]:
    """Return all pods of the manifest's job, node 0 first. Raises KeyError if the manifest has no job."""
    kinds = {document.get("kind") for document in documents}
    readers = {"PyTorchJob": _pytorchjob, "TrainJob": _trainjob, "JobSet": _jobset, "Job": _job}
    for kind, pods in readers.items():
        if kind in kinds:
            return list(pods(documents))
    raise KeyError(f"no job among {', '.join(sorted(map(str, kinds)))}")


def _pytorchjob(documents: list[Document]) -> Iterator[PodPlan]:
    job = find(documents, "PyTorchJob")
    name, replicas = job["metadata"]["name"], job["spec"]["pytorchReplicaSpecs"]
    templates = {each.where.rpartition(" ")[2]: each for each in pod_templates(job)}
    for role in ("Master", "Worker"):
        for index in range((replicas.get(role) or {}).get("replicas", 0)):
            host = f"{name}-{role.lower()}-{index}"
            added = operator_environment(job, role, index)
            labels = {"training.kubeflow.org/replica-index": str(index)}
            yield _pod(templates[role], host, (host,), index, role, added, labels)


def operator_environment(job: Document, role: str, index: int) -> dict[str, str]:
    """Return the variables that the training operator adds to every container."""
    spec, name = job["spec"], job["metadata"]["name"]
    replicas = spec["pytorchReplicaSpecs"]
    total = sum(replica["replicas"] for replica in replicas.values())
    nproc = str(spec.get("nprocPerNode", "auto"))
    added = {"PYTHONUNBUFFERED": "1", "PET_NNODES": str(total), "PET_NPROC_PER_NODE": nproc}
    if "Master" in replicas:
        rank = str(index if role == "Master" else index + 1)
        port = str(_port(replicas["Master"]["template"]))
        world_size = total * (int(nproc) if nproc.isdigit() else 1)
        added |= {
            "MASTER_ADDR": f"{name}-master-0", "MASTER_PORT": port, "RANK": rank,
            "WORLD_SIZE": str(world_size),
            "PET_MASTER_ADDR": f"{name}-master-0", "PET_MASTER_PORT": port, "PET_NODE_RANK": rank,
        }  # fmt: skip
    policy = spec.get("elasticPolicy")
    if policy is not None:
        host = policy.get("rdzvHost", f"{name}-worker-0")
        port = str(policy.get("rdzvPort", _port(replicas["Worker"]["template"])))
        added["PET_RDZV_ENDPOINT"] = f"{host}:{port}"
        added["PET_RDZV_BACKEND"] = policy.get("rdzvBackend", "c10d")
        if "minReplicas" in policy and "maxReplicas" in policy:
            added["PET_NNODES"] = f"{policy['minReplicas']}:{policy['maxReplicas']}"
        if "maxRestarts" in policy:
            added["PET_MAX_RESTARTS"] = str(policy["maxRestarts"])
    return added


def _port(template: Document) -> int:
    for container in template["spec"]["containers"]:
        for port in container.get("ports", []):
            if container["name"] == "pytorch" and port.get("name") == "pytorchjob-port":
                return int(port["containerPort"])
    return DEFAULT_PORT_OF_PYTORCHJOB


def _job(documents: list[Document]) -> Iterator[PodPlan]:
    """Yield the pods of an Indexed Job: the index, and names below the headless Service."""
    job = find(documents, "Job")
    (template,) = pod_templates(job)
    name, subdomain = job["metadata"]["name"], template.spec.get("subdomain", "")
    for index in range(job["spec"]["completions"]):
        host = f"{name}-{index}"
        yield _pod(template, host, (f"{host}.{subdomain}",), index, "Job", _indexed(index), {})


def _indexed(index: int) -> dict[str, str]:
    return {"JOB_COMPLETION_INDEX": str(index)}


def _jobset(documents: list[Document]) -> Iterator[PodPlan]:
    jobset = find(documents, "JobSet")
    for template, job in zip(pod_templates(jobset), jobset_spec(jobset)["replicatedJobs"], strict=True):
        for job_index in range(job.get("replicas", 1)):
            for index in range(job["template"]["spec"]["completions"]):
                yield _jobset_pod(template, jobset["metadata"]["name"], job["name"], job_index, index, {})


def _jobset_pod(
    template: PodTemplate, jobset: str, job: str, job_index: int, index: int, added: Mapping[str, str]
) -> PodPlan:
    host = f"{jobset}-{job}-{job_index}-{index}"
    labels = {"jobset.sigs.k8s.io/job-index": str(job_index)}
    variables = {**_indexed(index), **added}
    return _pod(template, host, (f"{host}.{jobset}",), index, job, variables, labels)


def _trainjob(documents: list[Document]) -> Iterator[PodPlan]:
    """Yield the pods of Trainer's JobSet, which has the TrainJob's name and a container `node`."""
    trainjob, runtime = find(documents, "TrainJob"), _runtime(documents)
    name, trainer = trainjob["metadata"]["name"], trainjob["spec"].get("trainer") or {}
    policy = runtime["spec"].get("mlPolicy") or {}
    nodes = trainer.get("numNodes", policy.get("numNodes", 1))
    nproc = trainer.get("numProcPerNode", (policy.get("torch") or {}).get("numProcPerNode", "auto"))
    (template,) = pod_templates(runtime)
    labels = {**template.labels, "jobset.sigs.k8s.io/jobset-name": name}
    template = replace(template, labels=labels)  # a ClusterTrainingRuntime has another name
    if nproc == "auto":
        nproc = _auto(template.container().get("resources") or {})
    for index in range(nodes):
        added = {
            "PET_NNODES": str(nodes), "PET_NPROC_PER_NODE": str(nproc), "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": f"{name}-node-0-0.{name}", "PET_MASTER_PORT": str(DEFAULT_PORT_OF_TRAINER),
        }  # fmt: skip
        added |= {each["name"]: each["value"] for each in trainer.get("env", [])}
        yield _jobset_pod(template, name, "node", 0, index, added)


def _auto(resources: Document) -> str:
    """Return Trainer's `auto`: torchrun's if there is a GPU, else one rank per requested CPU."""
    if any(name.endswith("/gpu") for name in resources.get("limits") or {}):
        return "auto"
    cpus = str((resources.get("requests") or {}).get("cpu", "1"))
    return str(max(1, math.ceil(float(cpus[:-1]) / 1000 if cpus.endswith("m") else float(cpus))))


def _runtime(documents: list[Document]) -> Document:
    kinds = [document.get("kind") for document in documents]
    return find(documents, "TrainingRuntime" if "TrainingRuntime" in kinds else "ClusterTrainingRuntime")


def _pod(
    template: PodTemplate,
    host: str,
    names: tuple[str, ...],
    index: int,
    role: str,
    added: Mapping[str, str],
    labels: Mapping[str, str],
) -> PodPlan:
    container = template.container()
    metadata = {
        "metadata.name": host,
        **{f"metadata.labels['{key}']": value for key, value in {**template.labels, **labels}.items()},
        f"metadata.annotations['{COMPLETION_INDEX}']": added.get("JOB_COMPLETION_INDEX", ""),
    }
    environment = {"HOSTNAME": host, **resolve(container.get("env", []), metadata), **added}
    command = (*container.get("command", []), *container.get("args", []))
    return PodPlan(host, names, index, role, environment, command, template)


def resolve(entries: list[dict[str, Any]], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a container's `env` as the kubelet sets it: with fields, and earlier $(NAME) entries expanded.

    Raises KeyError for a field that the pod does not have.
    """
    values: dict[str, str] = {}
    for entry in entries:
        if (entry.get("valueFrom") or {}).get("secretKeyRef", {}).get("optional"):
            continue  # as if there is no such Secret
        if "valueFrom" in entry:
            values[entry["name"]] = metadata[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        else:
            text = str(entry.get("value", ""))
            values[entry["name"]] = re.sub(
                r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda match: values.get(match[1], match[0]), text
            )
    return values
