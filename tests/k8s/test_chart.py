"""The Helm chart renders what kustomize renders, and what its values change."""

import itertools
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tandem.kubernetes.render import NEEDS, render
from tandem_k8s import chart
from tandem_k8s.documents import Document, load, pod_templates, title
from tandem_k8s.validate import problems

HELM = Path(__file__).parents[2] / "build" / "helm"


@pytest.fixture
def helm(require: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setenv("PATH", f"{HELM}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("HELM_CACHE_HOME", str(tmp_path))
    require("helm")
    require("kubectl")

    def run(*words: str) -> tuple[int, str, str]:
        done = subprocess.run(["helm", *words], capture_output=True, text=True, timeout=patient(60))
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture
def template(helm: Callable[..., Any]) -> Callable[..., list[Document]]:
    def make(*words: str, name: str = "tandem") -> list[Document]:
        code, said, errors = helm("template", name, str(chart.CHART), *words)
        assert code == 0, errors
        return load(said)

    return make


def plain(value: Any) -> Any:
    """Without what only a chart has: its own name as manager, Helm's annotations, and empty arguments."""
    if isinstance(value, dict):
        kept = {key: each for key, each in value.items() if not key.startswith("helm.sh/")}
        named = {key: plain(each) for key, each in kept.items() if (key, each) != ("args", [])}
        if named.get("annotations") == {}:
            del named["annotations"]
        if named.get("app.kubernetes.io/managed-by") == "Helm":
            named["app.kubernetes.io/managed-by"] = "tandem"
        return named
    return [plain(each) for each in value] if isinstance(value, list) else value


def sets() -> list[tuple[str, ...]]:
    """All sets of the chart's components that go together."""
    sizes = range(len(chart.COMPONENTS) + 1)
    every = [each for size in sizes for each in itertools.combinations(chart.COMPONENTS, size)]
    return [each for each in every if all(NEEDS.get(part, part) in each for part in each)]


def is_as_kustomize_renders(
    template: Callable[..., list[Document]], kind: str, parts: tuple[str, ...]
) -> None:
    theirs = {title(each): each for each in load(render(",".join((kind, *parts))))}
    words = ["--set", f"kind={kind},with={{{','.join(parts)}}}"] if parts else ["--set", f"kind={kind}"]
    for name, value in sizes_in(theirs).items():
        words += ["--set-string", f"{name}={value}"]
    assert {title(each): plain(each) for each in template(*words)} == theirs, parts


def sizes_in(documents: Mapping[str, Document]) -> dict[str, str]:
    """What a component changes and a chart has as a value."""
    (pod, *_) = [pod for each in documents.values() for pod in pod_templates(each)]
    limits = pod.container()["resources"]["limits"]
    claim = next(each for each in documents.values() if each["kind"] == "PersistentVolumeClaim")
    size = claim["spec"]["resources"]["requests"]["storage"]
    return {"cpu": limits["cpu"], "memory": limits["memory"], "storage.size": size}


def test_helm_keeps_the_claim_and_creates_the_runtime_first(template: Callable[..., list[Document]]) -> None:
    """`helm uninstall` deleted the checkpoints, and a TrainJob was posted before its runtime and refused."""
    documents = template("--set", "kind=trainjob")
    found = {each["kind"]: each["metadata"].get("annotations", {}) for each in documents}
    assert found["PersistentVolumeClaim"]["helm.sh/resource-policy"] == "keep"
    assert found["TrainingRuntime"]["helm.sh/hook"] == "pre-install"


@pytest.mark.parametrize("kind", chart.KINDS)
@pytest.mark.parametrize("parts", [(), ("gpu", "kueue", "network")], ids="+".join)
def test_it_is_what_kustomize_renders(
    template: Callable[..., list[Document]], kind: str, parts: tuple[str, ...]
) -> None:
    is_as_kustomize_renders(template, kind, parts)


@pytest.mark.parametrize("kind", chart.KINDS)
def test_so_is_every_set_of_components(template: Callable[..., list[Document]], kind: str) -> None:
    for parts in sets():
        is_as_kustomize_renders(template, kind, parts)


@pytest.mark.parametrize("kind", chart.KINDS)
def test_its_values_make_a_valid_job(template: Callable[..., list[Document]], kind: str) -> None:
    words = ["--set", f"kind={kind},nodes=5,gpus=8,with={{gpu,kueue}},queue=mine,args={{--task,digits}}"]
    words += ["--set", "image=registry.example/own:1.0,storage.size=1Ti,storage.className=fast"]
    documents = template(*words, "--set-string", "env.A=1", name="own")
    assert problems(documents) == []
    names = {each["metadata"]["name"] for each in documents}
    assert names <= {"own", "own-metrics", "own-checkpoints"}
    (claim,) = [each for each in documents if each["kind"] == "PersistentVolumeClaim"]
    assert claim["spec"]["storageClassName"] == "fast" and "1Ti" in str(claim["spec"])
    pods = [pod for each in documents for pod in pod_templates(each)]
    for pod in pods:
        container = pod.container()
        assert container["image"] == "registry.example/own:1.0" and container["args"] == ["--task", "digits"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 8 and pod.values()["A"] == "1"
    (job,) = [each for each in documents if "kueue.x-k8s.io/queue-name" in each["metadata"]["labels"]]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine"


@pytest.mark.parametrize(
    "words, said",
    [
        (("--set", "kind=job"), "indexed-job"),
        (("--set", "nodes=1"), "nodes"),
        (("--set", "with={gpus}"), "gpu"),
        (("--set", "with={rdma}"), "rdma needs gpu"),
        (("--set", "node=3"), "node"),
    ],
)
def test_a_wrong_value_is_refused(helm: Callable[..., Any], words: tuple[str, ...], said: str) -> None:
    code, _, errors = helm("template", "tandem", str(chart.CHART), *words)
    assert code != 0 and said in errors


def test_helm_finds_nothing_wrong_in_it(helm: Callable[..., Any]) -> None:
    code, said, errors = helm("lint", str(chart.CHART))
    assert code == 0 and "WARNING" not in said + errors, said + errors


def test_it_is_up_to_date(require: Callable[..., None]) -> None:
    require("kubectl")
    assert {name: (chart.CHART / name).read_text() for name in chart.files()} == chart.files()
