"""`tandem init`: its files are as they are meant to be, and each tool that they are for takes them."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import patient
from tandem.errors import ConfigError
from tandem.kubernetes.parameters import substituted
from tandem.kubernetes.render import ALIASES, FOLDERS, manifests
from tandem.shipped import checkout
from tandem.tasks.init import FILES, JOB, JOBS, NO_CHECKOUT, SLURM, chosen, init, job_name, name_of, texts

GOLDEN = Path(__file__).parents[1] / "fixtures" / "project"


def run(*command: object, folder: Path, limit: float = patient(120)) -> str:
    words = list(map(str, command))
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=limit)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    said = init(tmp_path / "My_Project")
    assert said.splitlines()[0].endswith("My_Project: " + ", ".join(FILES)) and "tandem check task.py" in said
    return tmp_path / "My_Project"


def test_golden() -> None:
    """To renew: write what `texts` gives into the files, and look at the difference."""
    made = texts(Path("/home/me/My_Project"), Path("/home/me/tandem"))
    del made[JOB]  # a copy of the manifest, which a test below compares
    assert {f"{name.replace('/', '-')}.txt": text for name, text in made.items()} == {
        path.name: path.read_text() for path in GOLDEN.iterdir()
    }


def test_what_is_there_already_stays(project: Path) -> None:
    (project / "task.py").write_text("mine\n")
    (project / "Dockerfile").unlink()
    with pytest.raises(ConfigError, match=r"has task\.py, test_task\.py, .* already; choose another"):
        init(project)
    assert (project / "task.py").read_text() == "mine\n" and not (project / "Dockerfile").exists()


def test_a_file_is_not_a_folder_for_a_project(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text("mine\n")
    with pytest.raises(ConfigError, match=r"task\.py is a file; .*tandem init DIR"):
        init(tmp_path / "task.py")


@pytest.mark.parametrize("name", ["task.py", "k8s/kustomization.yaml", "k8s"])
def test_nothing_is_written_through_a_link(tmp_path: Path, name: str) -> None:
    """A link that leads nowhere was no file that is there, and what it named was written."""
    outside, link = tmp_path / "outside", tmp_path / "project" / name
    outside.mkdir()
    link.parent.mkdir(parents=True)
    link.symlink_to(outside if name == "k8s" else outside / "new")
    with pytest.raises(ConfigError, match="choose another directory"):
        init(tmp_path / "project")
    assert list(outside.iterdir()) == [] and not (tmp_path / "project" / "test_task.py").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write .*: Not a directory; choose another directory"):
        init(tmp_path / "file" / "project")


@pytest.mark.parametrize(
    ("folder", "name"), [("My_Project", "my-project"), ("a.b--C", "a-b-c"), ("__", "project")]
)
def test_names_are_those_of_images_and_runs(folder: str, name: str, tmp_path: Path) -> None:
    assert name_of(tmp_path / folder) == name


def test_without_a_checkout_its_place_is_left_to_a_person() -> None:
    made = texts(Path("/home/me/p"), None)
    assert f"-f {NO_CHECKOUT}/compose/compose.yaml" in made["compose.override.yaml"]


@pytest.mark.parametrize("kind", JOBS)
def test_the_job_is_the_manifest_of_its_kind_under_the_projects_name(kind: str, tmp_path: Path) -> None:
    file = ALIASES.get(kind, kind)
    manifest = (manifests() / FOLDERS[file] / f"{file}.yaml").read_text()
    job = texts(tmp_path / "mine", None, kind=kind)[JOB]
    assert list(yaml.safe_load_all(job)) == list(yaml.safe_load_all(substituted(manifest, "mine")))
    assert "make k8s-apply" not in job and f"--kind {kind} --name mine" in job
    comments = [line for line in manifest.splitlines() if line.startswith("  ") and "#" in line]
    assert comments and all(line.partition("#")[2] in job for line in comments)


def test_names_of_jobs_begin_with_a_letter() -> None:
    names = {"2024_run": "run-2024-run", "a" * 60: "a" * 50, "My_Project": "my-project"}
    assert {folder: job_name(Path(folder)) for folder in names} == names


@pytest.mark.parametrize("kind", JOBS)
def test_its_kubernetes_files_need_nothing_outside_the_project(
    kind: str, tmp_path: Path, require: Callable[..., None]
) -> None:
    """The base was a path into a checkout, and the printed steps had no command for Kubernetes."""
    require("kubectl")
    made = tmp_path / "elsewhere"
    said = run(sys.executable, "-m", "tandem", "init", made, "--kubernetes", kind, folder=tmp_path)
    steps = [line.partition("#")[0].strip() for line in said.partition("next:")[2].splitlines()]
    assert steps[-2] == "kubectl apply -k k8s" and steps[-1].endswith("--name elsewhere")
    alone = tmp_path / "another" / "machine"
    shutil.copytree(made / "k8s", alone)
    documents = list(yaml.safe_load_all(run("kubectl", "kustomize", ".", folder=alone)))
    assert {each["metadata"]["labels"]["app.kubernetes.io/instance"] for each in documents} == {"elsewhere"}


def test_compose_and_slurm_choose_the_files(tmp_path: Path) -> None:
    basic = ["task.py", "test_task.py", ".env.example"]
    assert list(chosen(compose=True)) == [*basic, "Dockerfile", "compose.override.yaml"]
    assert list(chosen()) == list(FILES) and list(chosen(slurm=True)) == [*FILES, SLURM]
    said = run(sys.executable, "-m", "tandem", "init", "own", "--compose", "--slurm", folder=tmp_path)
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == sorted(
        [*chosen(compose=True, slurm=True)]
    )
    assert "tandem cluster up --nodes 2" in said and f"sbatch {SLURM} --task task.py:MyTask" in said
    script = (tmp_path / "own" / SLURM).read_text()
    assert "#   sbatch train.sbatch --task digits" in script and "slurm/train.sbatch" not in script
    run("bash", "-n", SLURM, folder=tmp_path / "own")


@pytest.mark.slow
def test_its_own_test_passes(project: Path) -> None:
    """As a person runs it: in the project's folder, with no setting of ours."""
    pytest_command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    run(*pytest_command, "test_task.py", folder=project, limit=patient(400))


def test_its_settings_are_settings(project: Path) -> None:
    text = (project / ".env.example").read_text()
    (project / ".env").write_text(text.replace("#TANDEM", "TANDEM"))
    shown = run(sys.executable, "-m", "tandem", "config", folder=project)
    assert 'task = "task.py:MyTask"' in shown and 'run_dir = "runs/my-project"' in shown


@pytest.mark.parametrize("kind", JOBS)
def test_every_kind_of_job_gets_the_projects_image_after_what_it_needs(
    kind: str, tmp_path: Path, require: Callable[..., None]
) -> None:
    """kustomize's own order has a TrainJob before its runtime, and then Kubeflow Trainer refuses it."""
    require("kubectl")
    init(tmp_path / "mine", kind=kind)
    documents = list(yaml.safe_load_all(run("kubectl", "kustomize", "k8s", folder=tmp_path / "mine")))
    kinds = [each["kind"] for each in documents]
    assert JOBS[kind] in kinds
    assert kind != "trainjob" or kinds.index("TrainingRuntime") < kinds.index("TrainJob")
    images = [line for line in yaml.safe_dump_all(documents).splitlines() if "image: " in line]
    assert {line.split()[-1] for line in images} == {"mine:1"}


def test_compose_takes_the_override(project: Path, require: Callable[..., None]) -> None:
    require("docker")
    compose = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    require("docker", compose.returncode == 0, "no compose plugin; type: sudo make docker-host")
    own = f"{checkout()}/compose/compose.yaml"
    shown = run("docker", "compose", "-f", own, "-f", "compose.override.yaml", "config", folder=project)
    node: dict[str, Any] = yaml.safe_load(shown)["services"]["node"]
    assert node["image"] == "my-project"
    assert node["environment"]["TANDEM_TASK"] == "/app/task.py:MyTask"
    assert node["environment"]["TANDEM_RUN_DIR"] == "/checkpoints/my-project"


def test_the_image_has_the_task_and_trains_it(project: Path) -> None:
    """A job of another kind, or without the patches of its manifest, trained the built-in digits."""
    assert (project / "Dockerfile").read_text().splitlines() == [
        "FROM tandem:cuda",
        "COPY task.py /app/",
        "ENV TANDEM_TASK=/app/task.py:MyTask",
    ]
    hadolint = Path(sys.executable).with_name("hadolint")
    run(hadolint, "Dockerfile", folder=project)
