"""The distribution: its metadata, what its wheel has, and that tandem runs from it without a checkout."""

import os
import re
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from trove_classifiers import classifiers

from tandem.kubernetes.render import render
from tandem_k8s import generate

ROOT = Path(__file__).parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHIPPED = "tandem/shipped/"
VISION = re.compile(r"(PIL|pillow|torchvision)\b.*", re.I)
"""What the extra `vision` brings into site-packages."""
ALONE = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, module_processes: Any) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("package")
    source = folder / "source"
    source.mkdir()
    for name in ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy2(ROOT / name, source)
    for name in ("compose", "k8s", "monitoring", "slurm"):  # what of them is shipped, setup.py says
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), str(source)]
    code, said = module_processes.run(build)
    assert code == 0, said
    return folder / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory, module_processes: Any) -> Iterator[Path]:
    """`bin` of an environment with the wheel, and all of this one but the checkout and the extra `vision`."""
    folder = tmp_path_factory.mktemp("environment")
    (beside := folder / "beside").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not re.match(r"_*(editable|distutils|tandem)", path.name) and not VISION.fullmatch(path.name):
            (beside / path.name).symlink_to(path)
    code, said = module_processes.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")])
    assert code == 0, said
    (packages,) = folder.glob("venv/lib/python3.*/site-packages")
    (packages / "beside.pth").write_text(f"{beside}\n")
    pip = [sys.executable, "-m", "pip", f"--python={folder}/venv/bin/python", "install", "--no-deps"]
    code, said = module_processes.run([*pip, "--no-index", "--find-links", str(dist), "tandem-train"])
    assert code == 0 and (folder / "venv" / "bin" / "tandem").exists(), said
    yield folder / "venv" / "bin"
    shutil.rmtree(folder)


def test_an_index_takes_it(dist: Path, processes: Any) -> None:
    files = sorted(map(str, dist.iterdir()))
    assert len(files) == 2, files
    code, said = processes.run([sys.executable, "-m", "twine", "check", "--strict", *files])
    assert code == 0, said
    assert [each for each in PROJECT["classifiers"] if each not in classifiers] == []


def test_its_metadata_is_complete_and_its_links_lead_somewhere(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    about = message_from_bytes(wheel.read(name))
    links = {line.partition(", ")[0] for line in about.get_all("Project-URL", [])}
    assert links == {"Homepage", "Documentation", "Repository", "Issues", "Changelog"}
    assert (
        about["Author"]
        and about["License-Expression"]
        and about["Description-Content-Type"] == "text/markdown"
    )
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    described = about.get_payload(decode=True).decode()  # type: ignore[union-attr]
    found = re.findall(r"\]\(([^)]+)\)", described)
    assert len(found) == len(re.findall(r"\]\(([^)]+)\)", text)) > 20
    base = re.escape(PROJECT["urls"]["Repository"])
    paths = [re.sub(rf"^{base}/(raw|blob)/main/|#.*", "", link) for link in found]
    assert [path for path in paths if not (ROOT / path).is_file()] == [], "the rest is absolute"
    assert re.sub(rf"\({base}/(raw|blob)/main/", "(", described).strip() == text.strip()


def test_the_wheel_has_every_file_of_the_package_and_the_licenses(wheel: zipfile.ZipFile) -> None:
    source = ROOT / "src"
    kept = {
        path.relative_to(source).as_posix()
        for path in (source / "tandem").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {"tandem/report/page/live.html", "tandem/tasks/project/task.py.txt", "tandem/py.typed"} <= kept
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    shipped = {name.removeprefix(SHIPPED) for name in names if name.startswith(SHIPPED)} - {"__init__.py"}
    assert names - {SHIPPED + name for name in shipped} == kept
    assert {"compose/compose.yaml", "compose/prometheus/prometheus.yml", "slurm/train.sbatch"} <= shipped
    assert "monitoring/rules.yaml" in shipped
    assert {path.relative_to(ROOT).as_posix() for path in manifests()} == {
        name for name in shipped if name.startswith("k8s/")
    }
    for name in shipped:
        assert wheel.read(SHIPPED + name) == (ROOT / name).read_bytes()
    text = wheel.read(f"{SHIPPED}compose/monitoring.yaml").decode()
    used = {os.path.normpath(f"compose/{each}") for each in re.findall(r"[ -](\.\.?/[\w./-]+)", text)}
    assert [each for each in used if not any(name.startswith(each) for name in shipped)] == []
    licenses = [name.rpartition("/")[2] for name in wheel.namelist() if ".dist-info/licenses/" in name]
    assert sorted(licenses) == ["LICENSE", "uplot-LICENSE"]


def manifests() -> list[Path]:
    """What kubectl reads: the manifests, their kustomizations and the files of those."""
    folders = ("base", "kinds", "components", "overlays")
    found = [path for name in folders for path in (ROOT / "k8s" / name).rglob("*") if path.is_file()]
    return [*found, *(ROOT / "k8s").glob("*.yaml")]


def test_the_installed_wheel_renders_as_the_checkout_does(
    installed: Path, processes: Any, tmp_path: Path, require: Callable[..., None]
) -> None:
    require("kubectl")
    words = ["k8s", "render", "--kind", "trainjob", "--with", "kueue,gpu,monitoring"]
    code, said = processes.run([str(installed / "tandem"), *words], cwd=tmp_path, env=ALONE)
    assert code == 0 and said == render("trainjob,gpu,kueue,monitoring")
    init = ["init", "project", "--kubernetes", "jobset"]
    code, said = processes.run([str(installed / "tandem"), *init], cwd=tmp_path, env=ALONE)
    assert code == 0, said
    code, said = processes.run(["kubectl", "kustomize", "project/k8s"], cwd=tmp_path, env=ALONE)
    assert code == 0 and "image: project:1" in said, said
    assert "ENV TANDEM_TASK=/app/task.py:MyTask" in (tmp_path / "project" / "Dockerfile").read_text()


def test_the_installed_wheel_runs_without_a_checkout(installed: Path, processes: Any, tmp_path: Path) -> None:
    for words in (["--help"], ["demo", "--help"], ["init", "project"]):
        code, said = processes.run([str(installed / "tandem"), *words], cwd=tmp_path, env=ALONE)
        assert code == 0, said
    program = "import tandem; print(tandem.__file__)"
    code, said = processes.run([str(installed / "python"), "-c", program], cwd=tmp_path, env=ALONE)
    assert code == 0 and said.startswith(str(installed.parent)), said


def test_a_cluster_without_a_checkout(
    installed: Path, processes: Any, free_port: int, tmp_path: Path
) -> None:
    """The engine is played: an image or a project's Dockerfile is asked for before anything is started."""
    (tmp_path / "bin").mkdir()
    docker = tmp_path / "bin" / "docker"
    docker.write_text('#!/bin/sh\n[ "$1" != compose ] || echo 2.30.0\n[ "$1" != build ] || exit 3\n')
    docker.chmod(0o755)
    environ = {**ALONE, "PATH": f"{docker.parent}:{os.environ['PATH']}"}
    command = [str(installed / "tandem"), "cluster", "up", "--metrics-port", str(free_port)]
    code, said = processes.run(command, cwd=tmp_path, env=environ)
    assert code == 2 and said.count("\n") == 1 and "expected --image NAME, or a project" in said, said
    words = [str(installed / "tandem"), "init", "own", "--compose", "--slurm"]
    code, said = processes.run(words, cwd=tmp_path, env=environ)
    assert code == 0 and (tmp_path / "own" / "train.sbatch").is_file(), said
    code, said = processes.run(command, cwd=tmp_path / "own", env=environ)
    assert code == 2 and "own is not there: building it" in said and "try: docker build" in said, said


def test_a_task_that_needs_the_extra_vision_says_so(installed: Path, processes: Any, tmp_path: Path) -> None:
    train = [str(installed / "tandem"), "launch", "--task", "cifar10", "--run-dir", "run"]
    code, said = processes.run(train, cwd=tmp_path, env=ALONE)
    assert code == 2, said
    (line,) = [line for line in said.splitlines() if " error: " in line]
    assert "task cifar10 needs torchvision" in line and line.endswith("pip install 'tandem-train[vision]'")


@pytest.mark.slow
def test_the_demo_needs_no_torchvision_and_no_pillow(installed: Path, processes: Any, tmp_path: Path) -> None:
    program = "import importlib.util as u; print([u.find_spec(name) for name in ('PIL', 'torchvision')])"
    assert processes.run([str(installed / "python"), "-c", program], cwd=tmp_path, env=ALONE) == (
        0,
        "[None, None]\n",
    )
    code, said = processes.run([str(installed / "tandem"), "demo"], cwd=tmp_path, env=ALONE, limit=400)
    assert code == 0 and "steps lost" in said, said


def test_one_line_names_the_owner_for_all_files(require: Callable[..., None]) -> None:
    require("checkout", (ROOT / ".git").exists(), "git says which files there are")
    owned = generate.owned()
    assert {"pyproject.toml", "rules.yaml", "rules.test.yaml", "dashboard.json", "security.md"} <= {
        path.name for path in owned
    }
    late = [str(path) for path, text in owned.items() if path.read_text(encoding="utf-8") != text]
    assert late == [], "run make k8s-generate"


def test_a_new_owner_is_put_into_every_link(
    monkeypatch: pytest.MonkeyPatch, require: Callable[..., None]
) -> None:
    require("checkout", (ROOT / ".git").exists(), "git says which files there are")
    before = generate.owner()
    monkeypatch.setattr(generate, "owner", lambda: "acme-labs")
    for path, text in generate.owned().items():
        assert f"{before}/tandem" not in text and "acme-labs/tandem" in text, path
