"""`tandem.launch(function)`: what is refused before anything starts, and what is sent to the ranks."""

import pickle
import re
import subprocess
import sys
import threading
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.errors import ConfigError
from tandem.launch import from_python
from tandem.script import function
from tandem.script.job import FUNCTION, Program

ROOT = Path(__file__).parents[2]


def nothing() -> None:
    """A function for launches that are refused."""


@pytest.mark.parametrize(
    ("called", "settings", "words"),
    [
        ("train.py", {}, ["'train.py'", "a function", "tandem launch SCRIPT.py"]),
        (nothing, {"step": 5}, ["unknown setting step", "did you mean steps?"]),
        (nothing, {"steps": "many"}, ["steps", "'many'"]),
        (nothing, {"steps": 1.5}, ["steps", "1.5"]),
        (nothing, {"nodes": 0}, ["nodes", "0"]),
        (nothing, {"nproc": "some"}, ["nproc", "'some'"]),
        (nothing, {"resume": ""}, ["resume", "''"]),
        (nothing, {"task": "digits"}, ["task", "tandem.launch"]),
        (nothing, {"master": "here:29500"}, ["master", "tandem.launch"]),
    ],
)
def test_bad_input_is_one_line_before_anything_starts(
    called: Any, settings: dict[str, Any], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(from_python.subprocess, "Popen", None)
    with pytest.raises(ConfigError) as caught:
        tandem.launch(called, **settings)
    assert caught.value.exit_code == 2
    assert not [word for word in words if word not in str(caught.value)], caught.value
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_function_that_cannot_be_sent_is_one_line_and_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(from_python.subprocess, "Popen", None)
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"^locks cannot be sent .*lock.*inside the function$"):
        tandem.launch(named("locks", lambda: lock.locked()))
    assert not list(tmp_path.iterdir())


def named(name: str, called: Callable[..., Any]) -> Callable[..., Any]:
    called.__name__ = name
    return called


def ran(file: Path, called: Callable[..., Any], *arguments: Any) -> Any:
    """What rank 0's process writes."""
    function.write(file, called, arguments)
    function.run(file)
    return pickle.loads(file.with_suffix(function.RESULT).read_bytes())


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path / "train.pickle"


def test_lambdas_closures_and_local_classes_come_and_go(file: Path) -> None:
    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

    offset = 3
    assert ran(file, lambda a, b: a + b + offset, 1, 2) == 6
    found = ran(file, lambda: Local(offset))
    assert isinstance(found, Local) and found.value == 3


def test_the_function_sees_its_name_and_the_callers_modules(file: Path) -> None:
    sys.path.insert(0, "relative")
    assert ran(file, lambda: (sys.argv, sys.path[0])) == (["train"], str(Path("relative").absolute()))


def test_a_traceback_names_the_functions_own_file_and_line(file: Path) -> None:
    def fails() -> None:
        raise LookupError("no such thing")

    with pytest.raises(LookupError) as caught:
        ran(file, fails)
    innermost = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (innermost.filename, innermost.name) == (__file__, "fails")
    assert innermost.line == 'raise LookupError("no such thing")'


def test_only_rank_0_writes_a_result(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    function.write(file, threading.Lock, ())
    function.run(file)
    assert [each.name for each in file.parent.iterdir()] == ["train.pickle"]


def test_a_result_that_cannot_be_pickled_is_one_line(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train returned lock, which cannot be pickled \(TypeError: .*\)"):
        ran(file, threading.Lock)
    assert [each.name for each in file.parent.iterdir()] == ["train.pickle"]


def test_the_run_is_called_after_the_function() -> None:
    assert Program("module", FUNCTION, ("/tmp/x/train.pickle",)).name == "train"
    assert Program("module", FUNCTION).name == "function"


def test_the_public_names_come_without_torch_until_they_are_used() -> None:
    assert sorted(tandem.__all__) == ["Datasets", "Run", "TandemError", "Task", "launch", "start"]
    code = "import sys, tandem; tandem.launch; import tandem.launch.program_arguments"
    code += "; assert callable(tandem.launch) and 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert all(callable(getattr(tandem, name)) for name in tandem.__all__)


@pytest.mark.parametrize("file", [".github/workflows/release.yml", "docker/image.mk"])
def test_the_version_is_written_once(file: str) -> None:
    about = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in about["project"] and "version" in about["project"]["dynamic"]
    assert about["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "tandem.__version__"}
    (command,) = re.findall(r"sed -n '.*__version__.*' [\w/.]+", (ROOT / file).read_text())
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == f"{tandem.__version__}\n"
