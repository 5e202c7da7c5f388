"""The environment derived from a manifest: against what real pods got, and as tandem reads it."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem.kubernetes.render import render
from tandem.platforms.detection import Placement, detect
from tandem_k8s.contract import operator_environment, plan, resolve
from tandem_k8s.documents import ROOT, Document, find, load, read

CAPTURED = Path(__file__).parents[1] / "fixtures" / "environments"


def captured(name: str) -> dict[str, str]:
    lines = (CAPTURED / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def bare_job(name: str, master: bool, workers: int, **spec: Any) -> Document:
    """A PyTorchJob as those that were captured: nothing but replicas and what is given."""
    container = {"name": "pytorch", "ports": [{"name": "pytorchjob-port", "containerPort": 23456}]}
    template = {"spec": {"containers": [container]}}
    replicas = {"Master": {"replicas": 1, "template": template}} if master else {}
    replicas |= {"Worker": {"replicas": workers, "template": template}} if workers else {}
    return {
        "kind": "PyTorchJob",
        "metadata": {"name": name},
        "spec": {"pytorchReplicaSpecs": copy.deepcopy(replicas), **spec},
    }


ELASTIC = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "maxRestarts": 5, "rdzvBackend": "c10d"}}
WITH_MASTER = {"elasticPolicy": {"minReplicas": 1, "maxReplicas": 2, "rdzvBackend": "c10d"}}
REAL = [
    (bare_job("plain", True, 2), ["master-0", "worker-0", "worker-1"]),
    (bare_job("nproc2", True, 1, nprocPerNode="2"), ["master-0", "worker-0"]),
    (bare_job("nprocauto", True, 1, nprocPerNode="auto"), ["master-0", "worker-0"]),
    (bare_job("masteronly", True, 0), ["master-0"]),
    (bare_job("workeronly", False, 2), ["worker-0", "worker-1"]),
    (bare_job("elastic", False, 2, **ELASTIC), ["worker-0", "worker-1"]),
    (bare_job("elasticmaster", True, 1, **WITH_MASTER), ["master-0", "worker-0"]),
]


@pytest.mark.parametrize(("job", "pods"), REAL, ids=[job["metadata"]["name"] for job, _ in REAL])
def test_derived_environments_are_those_of_real_pods(job: Document, pods: list[str]) -> None:
    name = job["metadata"]["name"]
    for pod in pods:
        role, _, index = pod.partition("-")
        derived = operator_environment(job, role.capitalize(), int(index))
        assert {"HOSTNAME": f"{name}-{pod}", **derived} == captured(f"pytorchjob-{name}-{pod}")


def test_an_indexed_jobs_environment_is_that_of_real_pods() -> None:
    """The captured Job set NODE_RANK from the annotation; ours reads the variable that every one has."""
    for pod in plan(read(ROOT / "indexed-job.yaml"))[:2]:
        real = captured(f"indexedjob-{pod.index}")
        assert pod.environment["JOB_COMPLETION_INDEX"] == real["JOB_COMPLETION_INDEX"] == real["NODE_RANK"]


def documents(name: str) -> list[Document]:
    path = ROOT / f"{name}.yaml"
    return read(path) if path.is_file() else load(render(name))


def with_nproc_2(given: list[Document]) -> list[Document]:
    find(given, "PyTorchJob")["spec"]["nprocPerNode"] = "2"
    return given


def same(given: list[Document]) -> list[Document]:
    return given


Change = Callable[[list[Document]], list[Document]]
SHAPES: list[tuple[str, Change, str, int | None, str]] = [
    ("pytorchjob", same, "kubeflow-v1", 1, "tandem-master-0:23456"),
    ("pytorchjob", with_nproc_2, "kubeflow-v1", 2, "tandem-master-0:23456"),
    ("elastic", same, "kubeflow-v1", 1, "tandem-worker-0:23456"),
    ("trainjob", same, "kubeflow-v2", 1, "tandem-node-0-0.tandem:29500"),
    ("jobset", same, "jobset", None, "tandem-node-0-0.tandem:29500"),
    ("indexed-job", same, "indexed-job", None, "tandem-0.tandem:29500"),
]


@pytest.mark.parametrize(("name", "change", "platform", "nproc", "master"), SHAPES)
def test_tandem_reads_every_pods_place(
    name: str,
    change: Change,
    platform: str,
    nproc: int | None,
    master: str,
) -> None:
    pods = plan(change(documents(name)))
    places = [detect(pod.environment, pod.environment["HOSTNAME"]) for pod in pods]
    assert [place.node_rank for place in places] == [0, 1, 2]
    assert {pod.environment["TANDEM_LOG_FORMAT"] for pod in pods} == {"json"}  # for the cluster's collector
    host, _, port = master.partition(":")
    for pod, place in zip(pods, places, strict=True):
        elastic = (1, 3) if name == "elastic" else None
        own = next(known for known in (*pod.names, pod.name) if known == place.local_name)
        assert place == Placement(platform, 3, place.node_rank, nproc, host, int(port), elastic, own)
    assert host in pods[0].names  # node 0 is where the others look


def test_fields_and_references_are_filled_in_as_the_kubelet_does() -> None:
    entries = [
        {"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "B", "value": "/x/$(A)/$(LATER)"},
        {"name": "LATER", "value": "z"},
    ]
    assert resolve(entries, {"metadata.name": "pod-1"}) == {
        "A": "pod-1",
        "B": "/x/pod-1/$(LATER)",
        "LATER": "z",
    }
    assert plan(documents("pytorchjob"))[0].environment["TANDEM_RUN_DIR"] == "/checkpoints/tandem"
