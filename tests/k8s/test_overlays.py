"""`kubectl kustomize` of every overlay, its golden text, and what each overlay is for."""

import itertools
import os
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from small_jobs import ten_lines

from patience import patient
from tandem import __version__
from tandem.kubernetes.render import (
    CONTRADICTIONS,
    FOLDERS,
    NEEDS,
    ORDER,
    UsageError,
    allowed,
    kinds,
    parts_of,
    render,
)
from tandem_k8s import generate, release
from tandem_k8s.contract import plan
from tandem_k8s.documents import OVERLAYS, ROOT, Document, find, load, pod_templates, title
from tandem_k8s.schemas import closed_schema
from tandem_k8s.validate import problems, problems_of


@pytest.fixture(autouse=True)
def _needs_kubectl(require: Callable[..., None]) -> None:
    require("kubectl")


@cache
def rendered(overlay: str) -> str:
    done = subprocess.run(
        ["kubectl", "kustomize", str(ROOT / "overlays" / overlay)],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""  # no deprecated field
    return done.stdout


def test_there_is_an_overlay_and_a_component_of_each_name() -> None:
    for kind in ("overlays", "components"):
        assert sorted(path.name for path in (ROOT / kind).iterdir()) == sorted(OVERLAYS)


@pytest.mark.parametrize("overlay", generate.GOLDENS)
def test_golden(overlay: str) -> None:
    """By content: kustomize's releases order documents differently. `make k8s-generate` renews the files."""
    golden = load(generate.golden_path(overlay).read_text())
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
        assert resources["limits"]["nvidia.com/gpu"] == resources["requests"]["nvidia.com/gpu"] == 1
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


def sets_of(kind: str) -> list[tuple[str, ...]]:
    """Every set of components that a kind may have, with what they need, each once."""
    names, found = allowed(kind), []
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            contradicts = any({*pair} <= {*chosen} for pair in CONTRADICTIONS)
            complete = all(NEEDS[name] in chosen for name in chosen if name in NEEDS)
            if complete and not contradicts:
                found.append(chosen)
    return found


ALL_SETS = [(kind, chosen) for kind in FOLDERS for chosen in sets_of(kind)]


def covers_pairs(kind: str) -> list[tuple[str, ...]]:
    """Some of a kind's sets: each component alone with what it needs, and as few as have every pair."""
    sets = sets_of(kind)
    wanted = {pair for each in sets for pair in itertools.combinations(each, 2)}
    chosen = [each for each in sets if len(each) <= 1]
    for each in sorted(sets, key=len, reverse=True):
        if new := wanted & set(itertools.combinations(each, 2)):
            chosen.append(each)
            wanted -= new
    return chosen


def check_set(kind: str, chosen: tuple[str, ...]) -> None:
    """It passes the closed schemas, the security check, all rules, and the contract of its controller."""
    documents = load(render(",".join([kind, *chosen])))
    assert problems(documents) == [], (kind, chosen)
    if kind == "cluster-runtime":
        documents += load(ten_lines())
    pods = plan(documents)
    assert [pod.index for pod in pods] == [0, 1, 2] or kind in ("pytorchjob", "cluster-runtime")
    for pod in pods:
        assert pod.environment["TANDEM_RUN_DIR"].startswith("/checkpoints/")
        assert pod.environment.get("TANDEM_DEVICE", "") == (
            "cpu" if "cpu" in chosen else "cuda" if "gpu" in chosen else ""
        )
        assert ("NCCL_NET" in pod.environment) is ("rdma" in chosen)
        assert ("/script/train.py" in pod.command) is ("script" in chosen)
    names = {title(each) for each in documents}
    assert ("PodMonitor tandem" in names) is ("monitoring" in chosen)
    assert ("NetworkPolicy tandem-egress" in names) is ("network" in chosen)
    (job,) = [each for each in documents if each["kind"] in JOBS]
    assert ("kueue.x-k8s.io/queue-name" in job["metadata"].get("labels", {})) is ("kueue" in chosen)
    assert ("elasticPolicy" in job["spec"]) is ("elastic" in chosen)


JOBS = ("PyTorchJob", "TrainJob", "JobSet", "Job")


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.timeout(900)
def test_every_pair_of_components_works_for_every_kind(kind: str) -> None:
    for chosen in covers_pairs(kind):
        check_set(kind, chosen)


@pytest.mark.soak
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_set_of_components_works_for_every_kind(kind: str) -> None:
    for chosen in sets_of(kind):
        check_set(kind, chosen)


def test_every_order_is_the_same_or_one_line() -> None:
    """All orders of the largest selections, and of every pair and triple of names."""
    for kind, chosen in [(kind, max(sets_of(kind), key=len)) for kind in FOLDERS]:
        wanted = parts_of(",".join([kind, *chosen]))
        assert wanted == (kind, list(chosen))
        assert all(parts_of(",".join(each)) == wanted for each in itertools.permutations([kind, *chosen]))
    for size in (2, 3):
        for names in itertools.combinations([*FOLDERS, *ORDER], size):
            assert len({outcome(",".join(each)) for each in itertools.permutations(names)}) == 1, names


def outcome(selection: str) -> str:
    """The parts, or that there are none; a refusal has one line."""
    try:
        return str(parts_of(selection))
    except UsageError as error:
        assert "\n" not in str(error)
        return "refused"


def test_sorted_parts_and_what_they_need() -> None:
    assert parts_of("gpu, gpu,pytorchjob") == ("pytorchjob", ["gpu"])
    assert parts_of("rdma") == ("pytorchjob", ["gpu", "rdma"])
    assert parts_of("kueue,job") == ("indexed-job", ["kueue"])
    assert sorted(path.name for path in (ROOT / "components").iterdir()) == sorted(ORDER)
    assert len(ALL_SETS) > 300


def test_elastic_before_the_others_is_an_error_of_kustomize(tmp_path: Path) -> None:
    """In a kustomization of one's own: half a Master never comes back."""
    below = os.path.relpath(ROOT, tmp_path.resolve())
    lines = [f"resources: [{below}/base]", "components:"]
    lines += [f"- {below}/components/{name}" for name in ("elastic", "script")]
    (tmp_path / "kustomization.yaml").write_text("\n".join(lines))
    done = subprocess.run(
        ["kubectl", "kustomize", tmp_path], capture_output=True, text=True, timeout=patient(60)
    )
    assert done.returncode != 0 and "Master" in done.stderr


def test_a_trainjob_of_ten_lines() -> None:
    text = ten_lines()
    assert len(text.strip().splitlines()) == 10
    (job,) = load(text)
    assert closed_schema(job) == []
    pods = plan([job, *load(render("cluster-runtime,gpu"))])
    assert [pod.name for pod in pods] == [f"my-run-node-0-{index}" for index in range(4)]
    for pod in pods:
        assert pod.environment["TANDEM_RUN_DIR"] == "/checkpoints/my-run"
        assert pod.environment["PET_MASTER_ADDR"] == "my-run-node-0-0.my-run"
        assert (pod.environment["PET_NNODES"], pod.environment["PET_NPROC_PER_NODE"]) == ("4", "1")


def test_labels_of_every_document() -> None:
    for kind in FOLDERS:
        for each in load(render(f"{kind},gpu")):
            labels = each["metadata"]["labels"]
            assert labels["app.kubernetes.io/version"] == __version__
            assert labels["app.kubernetes.io/managed-by"] == "tandem"
    for each in load(rendered("monitoring")):
        if each["kind"] in ("PodMonitor", "PrometheusRule"):
            assert each["metadata"]["labels"]["release"] == "kube-prometheus-stack"


def test_the_version_is_this_one() -> None:
    assert [path for path, text in generate.versioned().items() if path.read_text() != text] == []


@pytest.mark.parametrize("kind", [kind for kind in FOLDERS if kind != "cluster-runtime"])
def test_the_metrics_service_finds_node_0_alone(kind: str) -> None:
    for parts in (["monitoring"], ["monitoring", "elastic"] if kind == "pytorchjob" else []):
        documents = load(render(",".join([kind, *parts])))
        (service,) = [each for each in documents if each["metadata"]["name"] == "tandem-metrics"]
        first, *_ = plan(documents)
        assert service["spec"]["selector"].items() <= first.template.labels.items()
        assert {"training.kubeflow.org/job-role", "training.kubeflow.org/replica-index",
                "batch.kubernetes.io/job-completion-index"} & set(service["spec"]["selector"])  # fmt: skip
        for monitor in (each for each in documents if each["kind"] == "PodMonitor"):
            assert monitor["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_egress_for_names_data_and_trackers() -> None:
    policies = [each for each in load(rendered("network")) if each["kind"] == "NetworkPolicy"]
    egress = next(each["spec"] for each in policies if each["metadata"]["name"] == "tandem-egress")
    ports = {port["port"] for rule in egress["egress"] for port in rule["ports"]}
    assert {53, 443, 9000, 5000} <= ports and egress["policyTypes"] == ["Egress"]
    assert "169.254.0.0/16" in str(egress)


def test_release_manifests_have_the_image_by_digest(tmp_path: Path) -> None:
    image = f"registry.example/team/tandem:1.0-cuda@sha256:{'a' * 64}"
    for path in release.write(image, tmp_path / "out"):
        text = path.read_text()
        images = {line.split("image: ")[1] for line in text.splitlines() if "image: " in line}
        assert images == {image} and problems_of(text) == []
    with pytest.raises(UsageError, match="has no digest"):
        release.write("registry.example/team/tandem:1.0", tmp_path)


def test_monitoring_scrapes_worker_0_where_there_is_no_master() -> None:
    documents = load(render("elastic,monitoring"))
    chosen = find(documents, "PodMonitor")["spec"]["selector"]["matchLabels"]
    (worker,) = pod_templates(find(documents, "PyTorchJob"))
    assert chosen.items() <= worker.labels.items()
    assert chosen["training.kubeflow.org/replica-index"] == "0"


@pytest.mark.parametrize(
    "selection", ["pytorchjob", "indexed-job", "jobset", "trainjob", "trainjob,cpu", "cpu", "gpu,kueue"]
)
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
        ("elastic,jobset", "", ["jobset has no component elastic"]),
        ("kueue,cluster-runtime", "", ["cluster-runtime has no component kueue"]),
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
