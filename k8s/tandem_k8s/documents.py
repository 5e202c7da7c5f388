"""YAML documents, and the pod templates in each kind of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Document = dict[str, Any]

ROOT = Path(__file__).parents[1]
MANIFESTS = ("pytorchjob", "indexed-job", "jobset", "trainjob", "cluster-runtime")
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's is 20 times as fast on large manifests
COMPLETION_INDEX = "batch.kubernetes.io/job-completion-index"
OVERLAYS = ("cpu", "gpu", "elastic", "rdma", "kueue", "monitoring", "network", "script")


@dataclass(frozen=True)
class PodTemplate:
    """One pod template. `where` is its name in messages, `main` is the container that trains, and `labels`
    are the labels of its pods at run time, including the controller's."""

    where: str
    template: Document
    main: str
    labels: Mapping[str, str]

    @property
    def spec(self) -> Document:
        return self.template.get("spec") or {}

    def containers(self) -> list[Document]:
        """All containers, init containers first."""
        return [*self.spec.get("initContainers", []), *self.spec.get("containers", [])]

    def container(self) -> Document:
        """Return the container that trains, or {} if it is missing (which a separate rule reports)."""
        return next((each for each in self.spec.get("containers", []) if each.get("name") == self.main), {})

    def mounts(self) -> list[Document]:
        """The volume mounts of the container that trains."""
        return list(self.container().get("volumeMounts", []))

    def values(self) -> dict[str, str]:
        """The literal variables of the container that trains."""
        return {each["name"]: each["value"] for each in self.container().get("env", []) if "value" in each}


def load(text: str) -> list[Document]:
    """All documents of a YAML text. Raises yaml.YAMLError."""
    try:
        documents = list(yaml.load_all(text, LOADER))
    except yaml.YAMLError:
        documents = list(yaml.safe_load_all(text))  # raises again, with the line that is wrong
    return [document for document in documents if document is not None]


def read(path: Path) -> list[Document]:
    return load(path.read_text(encoding="utf-8"))


def title(document: Mapping[str, Any]) -> str:
    """Return a document's name in messages, such as `Job tandem`."""
    return f"{document.get('kind')} {(document.get('metadata') or {}).get('name')}"


def find(documents: list[Document], kind: str) -> Document:
    """Return the first document of this kind. Raises KeyError if there is none."""
    for document in documents:
        if document.get("kind") == kind:
            return document
    raise KeyError(f"no {kind} among {', '.join(map(title, documents))}")


def jobset_spec(document: Document) -> Document:
    """The JobSet specification of a JobSet, or of a TrainingRuntime that becomes one."""
    holder: Document = document if document["kind"] == "JobSet" else document["spec"]["template"]
    spec: Document = holder["spec"]
    return spec


def pod_templates(document: Document) -> Iterator[PodTemplate]:
    """Yield the pod templates of a job, with the labels that their controllers add."""
    kind, name = document.get("kind"), (document.get("metadata") or {}).get("name", "")
    if kind == "PyTorchJob":
        for role, replica in (document["spec"].get("pytorchReplicaSpecs") or {}).items():
            prefix = "training.kubeflow.org"
            added = {f"{prefix}/job-name": name, f"{prefix}/replica-type": role.lower()}
            added[f"{prefix}/replica-index"] = "0"  # of the first pod
            if role == "Master":
                added[f"{prefix}/job-role"] = "master"
            yield _template(f"PyTorchJob {name} {role}", replica.get("template"), "pytorch", added)
    elif kind == "Job":
        added = {"batch.kubernetes.io/job-name": name, COMPLETION_INDEX: "0"}  # of the first pod
        yield _template(f"Job {name}", document["spec"].get("template"), "tandem", added)
    elif kind in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        for job in jobset_spec(document).get("replicatedJobs", []):
            added = {
                "jobset.sigs.k8s.io/jobset-name": name,  # of a TrainJob too: both have the run's name here
                "jobset.sigs.k8s.io/replicatedjob-name": job["name"],
                "batch.kubernetes.io/job-name": f"{name}-{job['name']}-0",
                COMPLETION_INDEX: "0",
            }
            main = "tandem" if kind == "JobSet" else "node"
            template = job["template"]["spec"].get("template")
            yield _template(f"{kind} {name} {job['name']}", template, main, added)


def _template(where: str, template: Document | None, main: str, added: Mapping[str, str]) -> PodTemplate:
    template = template or {}
    labels = {**((template.get("metadata") or {}).get("labels") or {}), **added}
    return PodTemplate(where, template, main, labels)


def job_specs(document: Document) -> Iterator[tuple[str, Document]]:
    """(where, batch/v1 JobSpec) of a Job and of the child jobs of a JobSet or TrainingRuntime."""
    if document.get("kind") == "Job":
        yield title(document), document["spec"]
    elif document.get("kind") in ("JobSet", "TrainingRuntime", "ClusterTrainingRuntime"):
        for job in jobset_spec(document).get("replicatedJobs", []):
            yield f"{title(document)} {job['name']}", job["template"]["spec"]
