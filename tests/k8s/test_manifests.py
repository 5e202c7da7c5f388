"""The manifests against every check, and the checks against deliberate mistakes."""

import copy
import json
from functools import cache

import pytest
from mistakes import MAIN, MISTAKES, NINE, Mistake

from tandem.kubernetes.render import render
from tandem_k8s.documents import MANIFESTS, OVERLAYS, ROOT, Document, find, load, pod_templates, read
from tandem_k8s.schemas import closed_schema, core_schema, round_trip
from tandem_k8s.security import restricted
from tandem_k8s.validate import problems, problems_of
from tandem_k8s.values import WORDS

pytestmark = pytest.mark.core


@cache
def _rendered(name: str) -> list[Document]:
    return read(ROOT / f"{name}.yaml") if name in MANIFESTS else load(render(name))


def manifest(name: str) -> list[Document]:
    """A copy of the file as written, or of the rendered overlay."""
    return copy.deepcopy(_rendered(name))


@pytest.mark.parametrize("name", [*MANIFESTS, *OVERLAYS])
def test_every_manifest_passes_every_check(name: str) -> None:
    assert problems(manifest(name)) == []


def test_deliberate_mistakes_are_all_caught() -> None:
    missed = []
    for mistake in MISTAKES:
        documents = manifest(mistake.manifest)
        mistake.made_in(documents)
        lines = problems(documents)
        if not any(mistake.word in line for line in lines):
            missed.append(f"{mistake.what}: {lines}")
    print(f"{len(MISTAKES) - len(missed)}/{len(MISTAKES)} deliberate mistakes caught")
    assert len(MISTAKES) >= 24 and not missed


@pytest.mark.parametrize("mistake", NINE, ids=lambda mistake: mistake.what)
def test_the_nine_pass_every_schema(mistake: Mistake) -> None:
    """So they need rules of their own; should a schema learn one of them, its rule can go."""
    documents = manifest(mistake.manifest)
    mistake.made_in(documents)
    for check in (closed_schema, core_schema, round_trip, restricted):
        assert [line for each in documents for line in check(each)] == []


def test_a_manifest_of_nothing_is_a_problem_and_not_a_crash() -> None:
    assert problems([{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": {"name": "x"}}])
    assert problems([{"apiVersion": "v1", "kind": "Surprise", "metadata": {"name": "x"}}])


def patterns(value: object) -> set[str]:
    if isinstance(value, dict):
        own = {value["pattern"]} if isinstance(value.get("pattern"), str) else set()
        return own.union(*map(patterns, value.values()))
    return set().union(*map(patterns, value)) if isinstance(value, list) else set()


def test_every_pattern_of_a_schema_has_words() -> None:
    for path in (ROOT / "schemas").glob("*.json"):
        assert patterns(json.loads(path.read_text())) - set(WORDS) == set(), path.name


LIMITS = "spec.template.spec.containers[tandem].resources.limits"


@pytest.mark.parametrize(
    ("manifest_name", "place", "value", "word"),
    [
        ("pytorchjob", "PyTorchJob metadata.name", "Tandem_1", "lowercase letters"),
        ("pytorchjob", f"{MAIN}.resources.limits.cpu", "two", "an integer, 500m or 1.5"),
        ("indexed-job", f"Job {LIMITS}.cpu", "two", "an integer, 500m or 1.5"),
        ("indexed-job", f"Job {LIMITS}.memory", "4GiB", "4Gi"),
        ("indexed-job", "Job metadata.name", "Tandem_1", "lowercase letters"),
        ("indexed-job", "Service metadata.name", "1st", "a letter first"),
        ("indexed-job", "PersistentVolumeClaim spec.resources.requests.storage", "20 GB", "20G"),
        ("indexed-job", "Service spec.ports[0].targetPort", [1], "text in quotes or an integer"),
        ("monitoring", "PodMonitor spec.podMetricsEndpoints[0].interval", "15 s", "30s"),
        ("monitoring", "PrometheusRule spec.groups[0].partial_response_strategy", "maybe", "abort or warn"),
    ],
)
def test_a_bad_value_is_answered_in_words(manifest_name: str, place: str, value: object, word: str) -> None:
    documents = manifest(manifest_name)
    Mistake("", manifest_name, place, value, "").made_in(documents)
    (line, *_) = [line for line in problems(documents) if f"invalid value {value!r}" in line]
    assert word in line and "^" not in line and "]*" not in line


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: [1", "line 1"),
        ("kind: Job\n  name: x\n", "line 2"),
        ("- a list\n", "expected a mapping"),
        ("", "no document"),
        ("a: \x07\n", "malformed YAML"),
    ],
)
def test_malformed_yaml_is_one_line(text: str, word: str) -> None:
    (line,) = problems_of(text)
    assert line.startswith("malformed YAML: ") and word in line and "\n" not in line


def test_round_trip_names_what_the_operator_would_drop() -> None:
    documents = manifest("pytorchjob")
    find(documents, "PyTorchJob")["spec"]["runPolicy"]["ttl"] = 5
    assert round_trip(find(documents, "PyTorchJob")) == [
        "PyTorchJob tandem: kubeflow-training drops spec.runPolicy.ttl"
    ]


def test_pytorchjob_is_one_file_and_one_template() -> None:
    assert (ROOT / "pytorchjob.yaml").resolve() == (ROOT / "base" / "pytorchjob.yaml").resolve()
    master, worker = pod_templates(find(manifest("pytorchjob"), "PyTorchJob"))
    assert master.template == worker.template


FATE = ["activeDeadlineSeconds", "cleanPodPolicy", "ttlSecondsAfterFinished", "restartPolicy"]


@pytest.mark.parametrize("field", FATE)
def test_fields_that_decide_a_jobs_fate_say_why(field: str) -> None:
    lines = (ROOT / "pytorchjob.yaml").read_text().splitlines()
    at = next(index for index, line in enumerate(lines) if line.strip().startswith(f"{field}:"))
    assert lines[at - 1].strip().startswith("#")
