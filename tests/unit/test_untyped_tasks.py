"""A task that nobody typed: its code is announced before it runs, and does not run from a run's directory."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from patience import patient
from tandem.checkpoint.state import serialize
from tandem.checkpoint.store import CheckpointStore
from tandem.cli import run
from tandem.config import Settings, resolve
from tandem.config.task_names import code_of, untyped_task_note
from tandem.errors import ConfigError, TandemError

TASK = """
import pathlib, sys
pathlib.Path({marker!r}).touch()
print("RUNS", file=sys.stderr, flush=True)
class Mine:
    def build_model(self): raise ValueError("no model")
    def build_datasets(self): raise ValueError("no data")
    def loss(self, model, batch): raise ValueError("no loss")
"""


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the code of `write_task` leaves when it runs. The current folder is another one."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "executed"


def write_task(path: Path, marker: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TASK.format(marker=str(marker)))
    return path


def a_run(folder: Path, task: str) -> Path:
    """A run with one checkpoint that names `task`."""
    settings = {**Settings().to_dict(), "task": task}
    CheckpointStore(folder / "checkpoints").save(5, serialize({"step": 5}), {"settings": settings})
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def commands(place: object) -> list[list[str]]:
    return [["eval", str(place)], *(["export", str(place), "--format", kind] for kind in ("onnx", "hf"))]


@pytest.mark.parametrize("inside", ["task.py", "checkpoints/task.py", "checkpoints/step-000000005/task.py"])
def test_code_in_the_run_s_own_directory_is_not_run(tmp_path: Path, marker: Path, inside: str) -> None:
    folder = tmp_path / "foreign"
    task = folder / inside
    write_task(a_run(folder, f"{task}:Mine") / inside, marker)
    for place in (folder, folder / "checkpoints", f"{folder}@5", folder / "checkpoints" / "step-000000005"):
        for words in commands(place):
            with pytest.raises(ConfigError, match="--task"):
                run(words[0], words[1:], {})
    assert not marker.exists()


def test_nor_where_a_link_or_a_module_leads_there(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "foreign"
    task = write_task(folder / "bad" / "task.py", marker)
    write_task(folder / "bad" / "__init__.py", marker)
    Path("link.py").symlink_to(task)
    (folder / "link.py").symlink_to(write_task(tmp_path / "real.py", marker))
    for number, name in enumerate(
        ("link.py:Mine", f"{folder}/link.py:Mine", f"{folder}/../foreign/link.py:Mine")
    ):
        other = a_run(tmp_path / f"other{number}", name)
        (folder / "checkpoints").unlink(missing_ok=True)
        (other / "checkpoints").rename(folder / "checkpoints")
        with pytest.raises(ConfigError, match="--task"):
            run("eval", [str(folder)], {})
        (folder / "checkpoints").rename(tmp_path / f"done{number}")
    a_run(folder, "bad.task:Mine")
    monkeypatch.chdir(folder)  # where modules are looked for last
    for words in commands("."):
        with pytest.raises(ConfigError, match="--task"):
            run(words[0], words[1:], {})
    assert not marker.exists()


def test_code_elsewhere_is_announced_before_it_runs(tmp_path: Path, marker: Path) -> None:
    task = write_task(tmp_path / "mine" / "task.py", marker)
    folder = a_run(tmp_path / "run", f"{task}:Mine")
    command = [sys.executable, "-m", "tandem", "eval", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
    assert marker.exists() and done.returncode != 0
    said = done.stderr[: done.stderr.index("RUNS")]
    assert str(task) in said and "Mine" in said and str(folder) in said and "--task" in said


def test_a_task_that_was_typed_is_neither_announced_nor_refused(
    tmp_path: Path, marker: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    task = write_task(folder / "task.py", marker)
    a_run(folder, f"{task}:Mine")
    with pytest.raises(TandemError):  # of the state
        run("export", [str(folder), "--format", "onnx", "--task", f"{task}:Mine"], {})
    assert "importing" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits", "tandem.tasks.digits:Digits"])
def test_our_own_tasks_need_no_word(name: str) -> None:
    assert code_of(name) == []


def loaded_task(text: str, file: str = ".env", environ: Mapping[str, str] | None = None) -> str:
    Path(file).parent.mkdir(exist_ok=True)
    Path(file).write_text(text)
    given = {"TANDEM_CONFIG": file} if file != ".env" else {}
    return untyped_task_note(resolve({}, {**given, **(environ or {})}))


def test_a_file_that_names_a_launch_s_task_is_told(tmp_path: Path, marker: Path) -> None:
    task = write_task(tmp_path / "mine" / "task.py", marker)
    for said in (loaded_task(f"TANDEM_TASK={task}:Mine\n"), loaded_task(f"task = '{task}:Mine'\n", "a.toml")):
        assert str(task) in said and "Mine" in said and "--task" in said
    assert ".env" in loaded_task(f"TANDEM_TASK={task}:Mine\n")
    assert loaded_task("TANDEM_TASK=digits\n") == ""
    assert loaded_task(f"TANDEM_TASK={task}:Mine\n", environ={"TANDEM_TASK": f"{task}:Mine"}) == ""
    assert not marker.exists()


def test_a_run_s_config_does_not_run_code_that_came_with_it(tmp_path: Path, marker: Path) -> None:
    task = write_task(tmp_path / "here" / "foreign" / "task.py", marker)
    with pytest.raises(ConfigError, match="--task"):
        loaded_task(json.dumps({"task": f"{task}:Mine"}), "foreign/config.json")
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["launch", pytest.param("check", marks=pytest.mark.slow)])
def test_a_verb_that_runs_tasks_says_so_first(verb: str, tmp_path: Path, marker: Path) -> None:
    task = write_task(tmp_path / "mine" / "task.py", marker)
    Path(".env").write_text(f"TANDEM_TASK={task}:Mine\n")
    more = ["--nodes", "1", "--run-dir", "run"] if verb == "launch" else ["--steps", "1"]
    command = [sys.executable, "-m", "tandem", verb, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
    assert done.returncode != 0 and marker.exists(), done.stderr
    said = done.stderr.partition("RUNS")[0]
    assert str(task) in said and ".env" in said and "--task" in said
