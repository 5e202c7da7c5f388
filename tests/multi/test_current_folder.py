"""Files that lie where somebody types the command are not run, whatever modules they are called like."""

import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = pytest.mark.timeout(300)

NAMES = sorted(
    sys.stdlib_module_names | {"torch", "numpy", "pydantic", "prometheus_client", "tqdm", "dotenv"}
)
HOSTILE = "import sys\nopen({marks!r}, 'a').write({name!r} + ' ')\nraise SystemExit('{name} was run')\n"
TASK = program_text("current_folder_task")
SCRIPT = program_text("current_folder_script")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder full of files named like modules, and one in it with a task, a script and a neighbour."""
    for name in NAMES:
        text = HOSTILE.format(marks=str(tmp_path / "marks"), name=name)
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "neighbour.py").write_text("WIDTH = 8\n")
    (tmp_path / "own" / "task.py").write_text(TASK)
    (tmp_path / "own" / "script.py").write_text(SCRIPT)
    return tmp_path


def ran(folder: Path) -> str:
    marks = folder / "marks"
    return marks.read_text() if marks.exists() else ""


def command(*words: object) -> list[str]:
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--run-dir", "run"]
    return [str(Path(sys.executable).parent / "tandem"), str(words[0]), *quiet, *map(str, words[1:])]


@pytest.mark.parametrize(
    "words",
    [pytest.param(("launch", "--nodes", 2), marks=pytest.mark.soak), ("train",), ("doctor",)],
    ids=["launch", "train", "doctor"],
)
def test_nothing_of_the_current_folder_is_run(
    folder: Path, processes: Any, words: tuple[object, ...]
) -> None:
    (folder / "own" / "queue.py").write_text((folder / "queue.py").read_text())  # beside the task, too
    task = ("--task", "own/task.py:Mine", "--steps", 4, "--batch-size", 24)
    code, output = processes.run(command(*words, *task), 200, cwd=folder)
    assert code == 0, output
    assert ran(folder) == ""


@pytest.mark.soak
def test_nor_by_python_m(folder: Path, processes: Any) -> None:
    (folder / "own" / "plain.py").write_text("import sys\nprint(*sys.modules)\n")
    code, modules = processes.run([sys.executable, "-m", "plain"], cwd=folder / "own")
    assert code == 0
    for name in modules.split():  # python's own -m imports these before anything of ours is there
        (folder / f"{name}.py").unlink(missing_ok=True)
    task = ("--task", "own/task.py:Mine", "--steps", 4, "--batch-size", 24)
    words = [sys.executable, "-m", "tandem", *command("launch", *task)[1:]]
    code, output = processes.run(words, 200, cwd=folder)
    assert code == 0, output
    assert ran(folder) == ""


@pytest.mark.parametrize(
    "how", [(), pytest.param(("--fresh-interpreter",), marks=pytest.mark.soak)], ids=["warm", "cold"]
)
def test_a_script_finds_its_own_folder_first_and_nothing_of_the_current_one(
    folder: Path, processes: Any, how: tuple[str, ...]
) -> None:
    (folder / "own" / "tabnanny.py").write_text("")  # in the way of the standard library's, as under python
    (folder / "own" / "script.py").write_text(SCRIPT + "assert tabnanny.__file__ == " + repr(
        str(folder / "own" / "tabnanny.py")) + "\n")  # fmt: skip
    code, output = processes.run(command("launch", *how, "own/script.py"), 200, cwd=folder)
    assert code == 0, output
    assert f"path {folder / 'own'} safe None" in output
    assert ran(folder) == ""
