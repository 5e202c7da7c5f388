"""The image: what it is, what it can do without rights, and how little a change of the source rebuilds."""

import json
import re
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from clusters import ROOT, docker

from patience import patient

pytestmark = pytest.mark.timeout(300)

LOCKED_DOWN = ("--rm", "--read-only", "--cap-drop", "ALL", "--tmpfs", "/tmp")
LOCKED_DOWN += ("--security-opt", "no-new-privileges", "-v", "/checkpoints", "-v", "/data")
SIZE_LIMIT_BYTES = 5_600_000_000


def inspect(image: str) -> dict[str, Any]:
    described = json.loads(docker("image", "inspect", image))
    return dict(described[0])


@pytest.mark.core
def test_what_the_image_declares(image: str) -> None:
    described = inspect(image)
    config = described["Config"]
    environment = dict(each.split("=", 1) for each in config["Env"])
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["tini", "--", "tandem"] and config["Cmd"] == ["launch"]
    assert config["StopSignal"] == "SIGTERM" and config["Healthcheck"]["Test"] == ["CMD", "tandem", "health"]
    assert "NVIDIA_VISIBLE_DEVICES" not in environment, "the runtime would give GPUs to who asked for none"
    assert environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    assert environment["NVIDIA_REQUIRE_CUDA"] == "cuda>=13.0"
    assert config["Labels"]["org.opencontainers.image.title"] == "tandem"
    assert config["Labels"]["org.opencontainers.image.version"] not in ("", "0")
    assert config["Labels"]["org.opencontainers.image.revision"] not in ("", "unknown")
    assert not config.get("Volumes"), "an anonymous volume would be left behind by every container"
    assert described["Size"] <= SIZE_LIMIT_BYTES


def test_doctor_names_the_libraries_without_any_right(image: str) -> None:
    said = docker("run", *LOCKED_DOWN, image, "doctor")
    lines = {line[:10].strip(): line[11:] for line in said.splitlines()}
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert f"torch=={lines['torch'].partition('+')[0]} " in locked
    assert f"nvidia-nccl-cu13=={lines['NCCL']} " in locked
    assert f"nvidia-cudnn-cu13=={lines['cuDNN']}." in locked
    assert lines["CUDA"].startswith("13.") and lines["gloo"] == "available"
    assert "/checkpoints/run: writable" in lines["run dir"] and "/data: writable" in lines["data"]


@pytest.mark.core
def test_it_trains_with_a_read_only_root(image: str) -> None:
    name = f"tandem-test-{uuid.uuid4().hex[:8]}"
    train = ["launch", "--steps", "5", "--metrics-linger", "0"]
    command = ["docker", "run", "--name", name, *LOCKED_DOWN, image, *train]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(250))
        assert ended.returncode == 0 and "finished at step 5" in ended.stderr + ended.stdout, ended.stderr
    finally:
        docker("rm", "--force", "--volumes", name, check=False)


def test_nccl_finds_the_verbs(image: str) -> None:
    """Without them it takes TCP, and the rdma overlay, which wants InfiniBand or nothing, ends."""
    code = "import ctypes; [ctypes.CDLL(name) for name in ('libibverbs.so.1', 'librdmacm.so.1')]"
    docker("run", "--rm", "--entrypoint", "python3", image, "-c", code)


@pytest.mark.timeout(1000)
def test_it_compiles_a_model(image: str) -> None:
    """There was no compiler."""
    rights = [word.replace("/tmp", "/tmp:exec") for word in LOCKED_DOWN]
    train = ["launch", "--steps", "2", "--compile", "--metrics-linger", "0"]
    command = ["docker", "run", *rights, image, *train]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=patient(900))
    assert ended.returncode == 0 and "finished at step 2" in ended.stderr + ended.stdout, ended.stderr


def test_the_user_owns_what_it_writes_and_no_program(image: str) -> None:
    program = (
        "import os; print(os.getuid(), [os.stat(p).st_uid for p in ('/checkpoints', '/data', '/run/tandem')],"
        " os.access('/opt/venv', os.W_OK), os.access('/opt/tandem', os.W_OK))"
    )
    said = docker("run", "--rm", "--entrypoint", "python3", image, "-c", program)
    assert said.strip() == "10001 [10001, 10001, 10001] False False"


def test_a_node_without_a_heartbeat_is_not_healthy(image: str) -> None:
    ended = subprocess.run(
        ["docker", "run", *LOCKED_DOWN, image, "health"], capture_output=True, text=True, timeout=patient(60)
    )
    assert ended.returncode == 1 and "no heartbeat" in ended.stdout


def test_a_change_of_the_source_keeps_every_heavy_layer(image: str, tmp_path: Path) -> None:
    """The packages' layers are shared with the image that is there; only tandem's own is new."""
    named = re.findall(r"^!(\S+\.\w+|LICENSE)$", (ROOT / ".dockerignore").read_text(), re.M)
    for name in (*named, ".dockerignore"):
        shutil.copy2(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docker", tmp_path / "docker")
    left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=left_out)
    with (tmp_path / "src" / "tandem" / "__init__.py").open("a") as file:
        file.write(f"# {uuid.uuid4()}\n")
    tag = f"tandem-test:{uuid.uuid4().hex[:8]}"
    build = ["make", "--silent", "-C", str(ROOT), "image", f"IMAGE={tag}", f"CONTEXT={tmp_path}"]
    try:
        built = subprocess.run(build, capture_output=True, text=True, timeout=patient(250))
        assert built.returncode == 0, built.stderr
        before, after = (inspect(each)["RootFS"]["Layers"] for each in (image, tag))
        assert before != after
        different = [layer for layer in after if layer not in before]
        assert len(different) <= 2, "tandem's own layer, and the empty one of WORKDIR"
    finally:
        docker("rmi", "--force", tag, check=False)


def test_sbom_names_every_locked_package(image: str, tmp_path: Path) -> None:
    made = subprocess.run(
        ["docker", "run", "--rm", "-i", "--read-only", "--entrypoint", "python3", image, "-"],
        input=(ROOT / "docker" / "sbom.py").read_text(), capture_output=True, text=True, timeout=patient(60),
    )  # fmt: skip
    sbom = json.loads(made.stdout)
    assert sbom["bomFormat"] == "CycloneDX"
    purls = {component["purl"] for component in sbom["components"]}
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = [line.split(" ")[0] for line in lock.splitlines() if line[:6] in ("torch=", "numpy=", "nvidia")]
    assert len([pin for pin in pinned if f"pkg:pypi/{pin.replace('==', '@')}" in purls]) >= len(pinned) - 1
    assert any(purl.startswith("pkg:deb/debian/tini@") for purl in purls)


def test_hadolint_is_content(require: Callable[..., None]) -> None:
    program = shutil.which("hadolint") or str(Path(sys.executable).parent / "hadolint")
    require("hadolint", Path(program).exists(), "type: make setup-dev")
    ended = subprocess.run([program, str(ROOT / "docker" / "Dockerfile")], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")
