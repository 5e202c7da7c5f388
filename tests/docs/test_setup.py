"""`make setup` takes PyTorch's build for CPUs from an index in PEP 503's form, or PyPI's where none answers.

Both indexes are here, on loopback: folders of wheels behind `python -m http.server`. The wheels of torch are
made here too; what they hold is a way to this environment's torch, so that all of the recipe runs.
"""

import base64
import hashlib
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(sysconfig.get_path("purelib"))
TORCH = ("torch", "torchvision")
LOCKED = dict(re.findall(r"^([a-z-]+)==([\d.]+)", (ROOT / "requirements-dev.lock").read_text(), re.M))


def make_wheel(index: Path, name: str, version: str) -> str:
    """A wheel in `index`/`name` that adds this environment's packages to the path; its SHA-256."""
    stem = f"{name.replace('-', '_')}-{version}"
    files = {
        f"{name}_beside.pth": f"{HERE}\n",
        f"{stem}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{stem}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    sums = {
        file: base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()) for file, text in files.items()
    }
    record = [f"{file},sha256={sums[file].decode().rstrip('=')},{len(text)}" for file, text in files.items()]
    files[f"{stem}.dist-info/RECORD"] = "\n".join([*record, f"{stem}.dist-info/RECORD,,\n"])
    path = index / name / f"{stem}-py3-none-any.whl"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(file, text)
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Checkout:
    """A copy of what `make setup` reads, and its two indexes; the lock files have four packages each."""

    def __init__(self, folder: Path, processes: Any) -> None:
        self._processes = processes
        self.root = folder / "checkout"
        self.root.mkdir()
        for name in ("LICENSE", "Makefile", "README.md", "pyproject.toml", "setup.py"):
            shutil.copy2(ROOT / name, self.root)
        for name in ("src", "docker", "compose", "k8s", "monitoring", "slurm"):
            left_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, self.root / name, ignore=left_out)
        lock = (ROOT / "requirements-dev.lock").read_text(encoding="utf-8")
        taken = [
            entry
            for entry in re.split(r"^(?=[a-z])", lock, flags=re.M)
            if entry.startswith(("setuptools==", "uv=="))
        ]
        (folder / "from-pypi.lock").write_text("".join(taken))
        pypi, cpu = folder / "pypi", folder / "cpu"
        self._fetch(folder / "from-pypi.lock", pypi)
        for name in TORCH:
            digest = make_wheel(pypi, name, LOCKED[name])
            taken.insert(0, f"{name}=={LOCKED[name]} \\\n    --hash=sha256:{digest}\n")
            make_wheel(cpu, name, LOCKED[name] + "+cpu")
        cuda = make_wheel(pypi, "nvidia-cublas", "13.0")
        taken.insert(0, f"nvidia-cublas==13.0 \\\n    --hash=sha256:{cuda}\n")
        for name in ("requirements.lock", "requirements-dev.lock"):
            (self.root / name).write_text("".join(sorted(taken)))
        self.cpu = self._serve(cpu)
        self._pypi = self._serve(pypi)

    def _fetch(self, lock: Path, pypi: Path) -> None:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        code, said = self._processes.run(
            [*pip, "--require-hashes", "-r", str(lock), "-d", str(pypi)], limit=300
        )
        assert code == 0, said
        for path in [*pypi.glob("*.whl")]:
            (folder := pypi / path.name.partition("-")[0]).mkdir()
            path.rename(folder / path.name)

    def _serve(self, folder: Path) -> str:
        words = ["-u", "-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), "0"]
        server = self._processes.start([sys.executable, *words], stderr=subprocess.DEVNULL)
        match = re.search(r"http://[\d.:]+", server.stdout.readline())
        assert match is not None
        return match[0]

    def make(self, *words: str) -> tuple[int, list[str]]:
        """Exit code of `make WORDS`, and the lines that are make's own."""
        kept = {
            name: text for name, text in os.environ.items() if not re.match(r"(UV|PIP|PYTHON)_?|TORCH", name)
        }
        environ = {**kept, "PIP_INDEX_URL": self._pypi, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
        code, said = self._processes.run(
            ["make", *words, f"PYTHON={sys.executable}"], cwd=self.root, env=environ, limit=300
        )
        return code, [line for line in said.splitlines() if line.startswith("make: ")]

    def installed(self) -> dict[str, str]:
        """{package: version}, of those that are not from PyPI's real files."""
        found = [path.name.split("-") for path in self.root.glob(".venv/lib/*/site-packages/*.dist-info")]
        listed = {words[0]: words[1].removesuffix(".dist") for words in found}
        return {
            name: text for name, text in listed.items() if name in ("torch", "torchvision", "nvidia_cublas")
        }


@pytest.fixture
def checkout(tmp_path: Path, processes: Any) -> Checkout:
    return Checkout(tmp_path, processes)


CPU, CUDA = {name: LOCKED[name] + "+cpu" for name in TORCH}, {name: LOCKED[name] for name in TORCH}
NO_ANSWER = (
    "make: no PyTorch for this machine from {}; installing PyPI's, with CUDA libraries "
    "(3 GB download, 6 GB on disk)"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_build_for_cpus_comes_from_its_own_index_and_stays(checkout: Checkout) -> None:
    code, lines = checkout.make("setup", "TORCH=cpu", f"TORCH_INDEX={checkout.cpu}")
    assert (code, lines) == (0, []) and checkout.installed() == CPU, "nothing of CUDA"
    (checkout.root / "requirements-dev.lock").touch()
    (checkout.root / "pyproject.toml").touch()
    code, lines = checkout.make("setup-dev", "TORCH=cpu", "TORCH_INDEX=http://127.0.0.1:9")
    assert (code, lines) == (0, []) and checkout.installed() == CPU, "it is there, so no index is asked"
    code, lines = checkout.make("setup", "TORCH=rocm")
    assert code == 2 and "'rocm'" in lines[0] and checkout.installed() == CPU
    code, lines = checkout.make("setup", "TORCH=cuda")
    assert code == 0 and len(lines) == 1 and checkout.installed() == {**CUDA, "nvidia_cublas": "13.0"}
    code, lines = checkout.make("setup", "TORCH=cuda")
    assert (code, lines) == (0, []), "it is there"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_an_index_that_does_not_answer_is_one_line(checkout: Checkout) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = f"http://127.0.0.1:{deaf.getsockname()[1]}/cpu"
        code, lines = checkout.make("setup", "TORCH=cpu", f"TORCH_INDEX={silent}")
    assert (code, lines) == (0, [NO_ANSWER.format(silent)])
    assert checkout.installed() == {**CUDA, "nvidia_cublas": "13.0"}


def test_another_build_than_these_two_is_one_line(processes: Any, tmp_path: Path) -> None:
    words = ["setup", "TORCH=rocm", f"VENV={tmp_path}/venv", f"PYTHON={sys.executable}"]
    code, said = processes.run(["make", *words], cwd=ROOT)
    assert code == 2 and "TORCH: invalid value 'rocm'; expected cpu or cuda" in said.splitlines()[0]
    assert not (tmp_path / "venv").exists()
