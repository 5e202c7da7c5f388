"""Runs of another user, whose directories are private: every verb says so in one line, and lists the rest."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from needs import require
from patience import patient

# Root reads everything, unless it starts the command without these capabilities.
LIKE_A_USER = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    """A directory of runs with one that this user may read and one that it may not."""
    if os.geteuid() == 0:
        require("setpriv", shutil.which("setpriv") is not None, "root reads everything without it")
    for name in ("mine", "theirs"):
        (tmp_path / name / "checkpoints" / "step-000000004").mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "theirs").chmod(0)
    yield tmp_path
    (tmp_path / "theirs").chmod(0o700)


def tandem(*words: object) -> subprocess.CompletedProcess[str]:
    command = [*(LIKE_A_USER if os.geteuid() == 0 else []), sys.executable, "-m", "tandem", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=patient(120))


@pytest.mark.parametrize(
    "words",
    [("checkpoints", "ls"), ("checkpoints", "verify"), ("eval",), ("export",), ("report",), ("runs",)],
)
def test_a_run_of_another_user_is_one_line(runs: Path, words: tuple[str, ...]) -> None:
    ended = tandem(*words, runs / "theirs")
    assert ended.returncode == 2 and ended.stdout == "", ended.stderr
    assert len(ended.stderr.splitlines()) == 1 and f"{runs / 'theirs'} cannot be read" in ended.stderr


def test_a_launch_into_it_names_the_flag(runs: Path) -> None:
    ended = tandem("launch", "--task", "digits", "--steps", 1, "--run-dir", runs / "theirs")
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"the run directory {runs / 'theirs'}: Permission denied; give another --run-dir" in ended.stderr


def test_its_health_is_not_that_of_a_directory_without_a_run(runs: Path) -> None:
    ended = tandem("health", runs / "theirs")
    assert ended.returncode == 1
    assert f"{runs / 'theirs'} cannot be read: Permission denied" in ended.stdout


def test_the_list_names_it_and_shows_the_others(runs: Path) -> None:
    ended = tandem("runs", runs, "--json")
    assert ended.returncode == 0
    assert [Path(each["path"]).name for each in json.loads(ended.stdout)["runs"]] == ["mine"]
    line = "not listed, because this user may not read them: theirs; ask their owner for access\n"
    assert ended.stderr == line
