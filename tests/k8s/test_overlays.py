"""`kubectl kustomize` of every overlay, its golden text, and what each overlay is for."""

import itertools
import subprocess
from collections.abc import Callable
from functools import cache

import pytest

from tandem_k8s import generate
from tandem_k8s.contract import plan
from tandem_k8s.documents import OVERLAYS, ROOT, Document, find, load, pod_templates, title
from tandem_k8s.render import CONTRADICTIONS, ORDER, UsageError, components, kinds, parts_of, render
from tandem_k8s.validate import problems


@pytest.fixture(autouse=True)
def _needs_kubectl(require: Callable[..., None]) -> None:
    require("kubectl")


@cache
def rendered(overlay: str) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no deprecated field
    return done.stdout


def test_there_is_an_overlay_and_a_component_of_each_name() -> None:
    for kind in ("overlays", "components"):
        assert sorted(path.name for path in (ROOT / kind).iterdir()) == sorted(OVERLAYS)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_golden(overlay: str) -> None:
    """By content: kustomize's releases order documents differently. `make k8s-generate` renews the files."""
    golden = load((generate.GOLDEN / f"{overlay}.yaml").read_text())
    now = load(generate.golden(overlay))
    assert {title(each): each for each in now} == {title(each): each for each in golden}
    assert len(now) == len(golden)


def pytorchjob(overlay: str) -> Document:
    return find(load(rendered(overlay)), "PyTorchJob")


def test_gpu_asks_for_gpus_in_both_roles() -> None:
    job = pytorchjob("gpu")
    templates = list(pod_templates(job))
    assert [each.where.rpartition(" ")[2] for each in templates] == ["Master", "Worker"]
    for each in templates:
        resources = each.container()["resources"]
        assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == "1"
        assert each.values()["TANDEM_DEVICE"] == "cuda"
    assert job["spec"]["nprocPerNode"] == "1"


def test_elastic_has_workers_only() -> None:
    spec = pytorchjob("elastic")["spec"]
    assert list(spec["pytorchReplicaSpecs"]) == ["Worker"]
    policy, workers = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert policy["rdzvBackend"] == "c10d"
    assert policy["minReplicas"] < policy["maxReplicas"] == workers


def test_cpu_fits_a_laptops_cluster() -> None:
    documents = load(rendered("cpu"))
    assert find(documents, "PersistentVolumeClaim")["spec"]["accessModes"] == ["ReadWriteOnce"]
    for each in pod_templates(find(documents, "PyTorchJob")):
        assert each.container()["image"] == "tandem:cpu"
        assert each.values()["TANDEM_DEVICE"] == "cpu"
        assert "nvidia.com/gpu" not in each.container()["resources"]["limits"]


def test_rdma_comes_with_gpus_and_stays_restricted() -> None:
    for each in pod_templates(pytorchjob("rdma")):
        assert {"rdma/hca", "nvidia.com/gpu"} <= set(each.container()["resources"]["limits"])
        assert "add" not in each.container()["securityContext"]["capabilities"]


def test_kueue_starts_suspended_in_its_queue() -> None:
    job = pytorchjob("kueue")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "training"
    assert job["spec"]["runPolicy"]["suspend"] is True


def test_monitoring_scrapes_the_master_and_brings_the_rules() -> None:
    documents = load(rendered("monitoring"))
    monitor, master = find(documents, "PodMonitor"), next(iter(pod_templates(pytorchjob("monitoring"))))
    endpoint = monitor["spec"]["podMetricsEndpoints"][0]
    assert endpoint["port"] in {port["name"] for port in master.container()["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= master.labels.items()
    groups = load(generate.RULES.read_text())[0]["groups"]
    assert find(documents, "PrometheusRule")["spec"]["groups"] == groups


def test_monitoring_files_are_made_from_monitoring() -> None:
    for path, text in generate.generated().items():
        assert path.read_text() == text, f"{path} is out of date: make k8s-generate"


def test_the_dashboard_becomes_a_configmap_that_grafana_finds() -> None:
    document = find(load(rendered("monitoring")), "ConfigMap")
    assert document["metadata"]["name"] == "tandem-dashboard"
    assert document["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert document["data"] == {"tandem.json": (generate.COMPONENT / "dashboard.json").read_text()}


def test_script_runs_its_file_in_both_roles() -> None:
    documents = load(rendered("script"))
    data = find(documents, "ConfigMap")["data"]
    assert data == {"train.py": (ROOT / "components/script/train.py").read_text()}
    program = ["tini", "--", "tandem", "launch", "/script/train.py", "--epochs", "10"]
    assert [list(pod.command) for pod in plan(documents)] == [program] * 3
    assert problems(load(render("gpu,script,kueue"))) == []


def test_components_combine() -> None:
    documents = load(render("gpu,rdma,kueue,monitoring"))
    assert problems(documents) == []
    assert {"PodMonitor", "PrometheusRule", "PyTorchJob"} <= set(kinds(render("gpu,monitoring")))
    elastic = load(render("gpu,elastic"))
    assert problems(elastic) == []
    assert list(find(elastic, "PyTorchJob")["spec"]["pytorchReplicaSpecs"]) == ["Worker"]


def test_components_combine_in_any_order() -> None:
    """Whatever goes together renders, and keeps all rules."""
    assert set(ORDER) == set(components())
    for pair in itertools.combinations(ORDER, 2):
        if pair not in CONTRADICTIONS:
            assert parts_of(",".join(pair)) == parts_of(",".join(reversed(pair))) != []
    for selection in ("elastic,monitoring,script,kueue,rdma", "elastic,cpu", "monitoring,kueue,rdma"):
        assert problems(load(render(selection))) == [], selection
    assert parts_of("gpu, gpu,pytorchjob") == ["gpu"] and parts_of("rdma") == ["gpu", "rdma"]


def test_monitoring_scrapes_worker_0_where_there_is_no_master() -> None:
    documents = load(render("elastic,monitoring"))
    chosen = find(documents, "PodMonitor")["spec"]["selector"]["matchLabels"]
    (worker,) = pod_templates(find(documents, "PyTorchJob"))
    assert chosen.items() <= worker.labels.items()
    assert chosen["training.kubeflow.org/replica-index"] == "0"


@pytest.mark.parametrize("selection", ["pytorchjob", "indexed-job", "jobset", "trainjob", "cpu", "gpu,kueue"])
def test_image_is_replaced_everywhere(selection: str) -> None:
    image = "registry.example:5000/team/tandem:1.2"
    text = render(selection, image)
    images = [line.split("image: ")[1] for line in text.splitlines() if "image: " in line]
    assert images and set(images) == {image}
    assert problems(load(text)) == []


@pytest.mark.parametrize(
    ("selection", "image", "words"),
    [
        ("gpuu", "", ["'gpuu'", "gpu", "indexed-job"]),
        ("gpu,jobset", "", ["jobset"]),
        ("", "", ["indexed-job", "gpu"]),
        ("gpu,cpu", "", ["cpu", "gpu"]),
        ("rdma,kueue,cpu", "", ["cpu", "rdma"]),
        ("jobset,trainjob", "", ["jobset", "trainjob"]),
        ("cpu", "two words", ["'two words'", "NAME[:TAG]"]),
    ],
)
def test_what_cannot_be_rendered_is_one_line(selection: str, image: str, words: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        render(selection, image)
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in words)
