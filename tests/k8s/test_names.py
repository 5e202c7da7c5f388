"""`--name` and `--nodes`: every place has them, and two jobs of one namespace share nothing they must not."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from tandem.kubernetes.commands import K8sCommand, run
from tandem.kubernetes.parameters import substituted
from tandem.kubernetes.render import UsageError, render
from tandem.platforms.detection import detect
from tandem_k8s.contract import plan
from tandem_k8s.documents import MANIFESTS, ROOT, Document, load, pod_templates, title
from tandem_k8s.validate import problems

SELECTIONS = [
    "pytorchjob,gpu,kueue,script,monitoring,network",
    "pytorchjob,monitoring,elastic",
    "jobset,gpu,kueue,script,monitoring,network",
    "trainjob,gpu,kueue,script,monitoring,network",
    "job,cpu,kueue,script,monitoring,network",
]
SHARED = {"PrometheusRule tandem", "ConfigMap tandem-dashboard"}


@pytest.fixture(autouse=True)
def _needs_kubectl(require: Callable[..., None]) -> None:
    require("kubectl")


@cache
def rendered(selection: str) -> str:
    return render(selection)


def named(selection: str, name: str, nodes: int | None = None) -> list[Document]:
    is_elastic = "elastic" in selection
    return load(
        substituted(rendered(selection), name, nodes, has_master=not is_elastic and "torch" in selection)
    )


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize("nodes", [1, 3, 5])
def test_another_name_and_number_of_nodes_pass_every_check(selection: str, nodes: int) -> None:
    documents = load(render(selection, name="other", nodes=nodes))
    assert problems(documents) == []
    pods = plan(documents)
    places = [detect(pod.environment, pod.environment["HOSTNAME"]) for pod in pods]
    assert [place.node_rank for place in places] == list(range(nodes))
    assert {place.nodes for place in places} == {nodes}
    elastic = (1, nodes) if "elastic" in selection else None
    assert {place.elastic for place in places} == {elastic}
    assert {pod.environment["TANDEM_RUN_DIR"] for pod in pods} == {"/checkpoints/other"}


def selectors(documents: list[Document]) -> Iterator[dict[str, str]]:
    """Every set of labels that selects pods."""
    for document in documents:
        yield from _selectors(document)


def _selectors(value: Any) -> Iterator[dict[str, str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            is_of_metrics = key == "selector" and "matchLabels" not in below
            if key == "matchLabels" or is_of_metrics:
                yield below
            else:
                yield from _selectors(below)
    elif isinstance(value, list):
        for each in value:
            yield from _selectors(each)


@pytest.mark.parametrize("selection", SELECTIONS)
def test_two_jobs_of_one_namespace_share_no_object_no_selector_and_no_claim(selection: str) -> None:
    one, other = named(selection, "tandem"), named(selection, "other")
    assert {title(each) for each in one} & {title(each) for each in other} <= SHARED
    for own, theirs in ((one, other), (other, one)):
        pods = [pod for document in theirs for pod in pod_templates(document)]
        for labels in selectors(own):
            if labels == {"kubernetes.io/metadata.name": "monitoring"}:
                continue  # the namespace of Prometheus
            assert not any(labels.items() <= pod.labels.items() for pod in pods), labels
    claims = [
        {
            volume["persistentVolumeClaim"]["claimName"]
            for pod in plan(documents)
            for volume in pod.template.spec["volumes"]
            if "persistentVolumeClaim" in volume
        }
        for documents in (one, other)
    ]
    assert claims == [{"tandem-checkpoints"}, {"other-checkpoints"}]


@pytest.mark.parametrize("selection", SELECTIONS)
def test_no_place_with_the_name_is_missed(selection: str) -> None:
    """What still says tandem is the product: labels, the image, a folder, and objects of all jobs."""
    kept = ("app.kubernetes.io/name", "app.kubernetes.io/part-of", "app.kubernetes.io/managed-by")
    for document in named(selection, "other"):
        if title(document) not in SHARED:
            for path, value in scalars(document, ()):
                if "tandem" in value and path[-1] not in kept and "train.py" not in path:
                    assert value in ("tandem", "tandem:cuda", "tandem:cpu", "/tmp/tandem"), (path, value)
                    assert value != "tandem" or path[-1] in ("name", "containerName", "*", "replacement"), (
                        path
                    )


def scalars(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        for key, below in value.items():
            yield from scalars(below, (*path, key))
    elif isinstance(value, list):
        for below in value:
            yield from scalars(below, (*path, "*"))
    elif isinstance(value, str):
        yield path, value


@pytest.mark.parametrize("selection", SELECTIONS)
def test_the_defaults_change_no_byte(selection: str) -> None:
    text = rendered(selection)
    assert render(selection, name="tandem") == text
    has_master = "pytorchjob" in selection and "elastic" not in selection
    assert substituted(text, "tandem", 3, has_master=has_master) == text


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_file_keeps_its_comments(name: str) -> None:
    text = (ROOT / f"{name}.yaml").read_text()
    assert substituted(text, "tandem", 3) == text
    made = substituted(text, "other")
    assert [line.partition(" #")[2] for line in made.splitlines()] == [
        line.partition(" #")[2] for line in text.splitlines()
    ]


@pytest.mark.parametrize("name", ["on", "null", "e5"])
def test_a_name_stays_text(name: str) -> None:
    documents = named("job,network", name)
    assert problems(documents) == []
    assert name in {each["metadata"]["name"] for each in documents}


@pytest.mark.parametrize(
    ("name", "nodes", "word"),
    [
        ("Upper", 3, "--name"),
        ("under_score", 3, "--name"),
        ("1st", 3, "--name"),
        ("-a", 3, "--name"),
        ("a-", 3, "--name"),
        ("", 3, "--name"),
        ("a" * 51, 3, "--name"),
        ("mine-metrics", 3, "--name"),
        ("mine", 0, "--nodes"),
        ("mine", 100_000, "--nodes"),
    ],
)
def test_a_name_or_count_that_kubernetes_would_refuse_is_one_line(name: str, nodes: int, word: str) -> None:
    for verb in ("render", "apply"):
        with pytest.raises(UsageError, match=f"^{word}: invalid value.*expected") as error:
            run(K8sCommand(verb, "job", name=name, nodes=nodes))
        assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_a_runtime_of_all_jobs_has_no_name_of_a_job() -> None:
    with pytest.raises(UsageError, match="--name: cluster-runtime"):
        run(K8sCommand("render", "cluster-runtime", name="other"))
