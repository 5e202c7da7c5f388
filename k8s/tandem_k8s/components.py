"""Generate kustomize replacements from a component's pod.yaml, for the pods of every kind of job.

Entries are addressed by name (`[name=TANDEM_THREADS]`), not by position in a list, so that manifests can add
or remove entries. kustomize does not know the custom kinds: a strategic merge would replace whole lists.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tandem_k8s.documents import ROOT, Document, read

COMPONENTS = ROOT / "components"
CHANGE_PODS = ("cpu", "gpu", "rdma", "script")
KEYS = {"env": "name", "volumeMounts": "name", "volumes": "name", "tolerations": "key"}
"""{list: the field that names its entries}."""
ALWAYS_THERE = "enableServiceLinks"
"""A field of every pod. It is not created, so kustomize reports a missing pod template."""


class Holder(NamedTuple):
    """The path of a pod in a kind of job, and the name of its main container."""

    kind: str
    pod: str
    container: str


_RUNTIME = "spec.template.spec.replicatedJobs.[name=node].template.spec.template.spec"
HOLDERS = (
    Holder("PyTorchJob", "spec.pytorchReplicaSpecs.Master.template.spec", "pytorch"),
    Holder("PyTorchJob", "spec.pytorchReplicaSpecs.Worker.template.spec", "pytorch"),
    Holder("Job", "spec.template.spec", "tandem"),
    Holder("JobSet", "spec.replicatedJobs.[name=node].template.spec.template.spec", "tandem"),
    Holder("TrainingRuntime", _RUNTIME, "node"),
    Holder("ClusterTrainingRuntime", _RUNTIME, "node"),
)


def replacements(name: str) -> list[Document]:
    """Return the replacements of a component, from its pod.yaml."""
    (template,) = read(COMPONENTS / name / "pod.yaml")
    (main,) = template["template"]["spec"]["containers"]
    assert main["name"] == "main"
    paths = [*_paths(template["template"]["spec"], ""), *_paths(main, "containers.[name=main].")]
    return [
        {
            "source": {
                "kind": "PodTemplate",
                "name": template["metadata"]["name"],
                "fieldPath": f"template.spec.{path}",
            },
            "targets": [_target(holder, path) for holder in HOLDERS],
        }
        for path in sorted(paths, key=lambda path: path != ALWAYS_THERE)
    ]


def _target(holder: Holder, path: str) -> Document:
    own = path.replace("[name=main]", f"[name={holder.container}]")
    create = {} if path == ALWAYS_THERE else {"options": {"create": True}}
    return {"select": {"kind": holder.kind}, **create, "fieldPaths": [f"{holder.pod}.{own}"]}


def _paths(value: Document, prefix: str) -> Iterator[str]:
    """Yield the paths to replace below a mapping: plain values, plain lists, and entries of lists by name."""
    for field, below in value.items():
        path = prefix + field.replace(".", "\\.")
        if field in KEYS:
            for entry in below:
                yield f"{path}.[{KEYS[field]}={entry[KEYS[field]]}]"
        elif isinstance(below, dict):
            yield from _paths(below, f"{path}.")
        elif field not in ("containers", "name"):
            yield path


def generated_replacements() -> dict[Path, Any]:
    """Return {replacements.yaml of a component: its content}."""
    return {COMPONENTS / name / "replacements.yaml": replacements(name) for name in CHANGE_PODS}
