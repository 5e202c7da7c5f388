"""`tandem demo`: one command shows a recovery in five lines."""

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]


@pytest.mark.core
def test_a_rank_is_killed_and_the_run_finishes(processes: Any, tmp_path: Path) -> None:
    environ = {**os.environ, "TANDEM_METRICS": "0"}
    code, said = processes.run([sys.executable, "-m", "tandem", "demo"], 500, cwd=tmp_path, env=environ)
    lines = said.splitlines()
    assert code == 0 and len(lines) == 5, said
    assert "rank 1 on node 1" in lines[1] and "SIGKILL" in lines[1] and "http://127.0.0.1:" in lines[1]
    assert re.search("steps lost: [01]$", lines[2]) and "accuracy" in lines[3] and "restarts: 1" in lines[3]
    (run_dir,) = (each for each in (tmp_path / "runs").iterdir() if each.is_dir())
    assert str(run_dir.relative_to(tmp_path)) in lines[4]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["state"] == "finished" and summary["global_step"] == 600


def test_a_directory_that_exists_is_left_alone(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    command = [sys.executable, "-m", "tandem", "demo", "--run-dir", "mine"]
    code, said = processes.run(command, cwd=tmp_path)
    assert code == 2 and "mine" in said and "--run-dir" in said
    assert list(tmp_path.iterdir()) == [tmp_path / "mine"]


def test_a_directory_that_cannot_be_written_is_one_line(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    command = [sys.executable, "-m", "tandem", "demo", "--run-dir", "file/run"]
    code, said = processes.run(command, cwd=tmp_path)
    assert code == 2 and len(said.splitlines()) == 1 and "file" in said and "--run-dir" in said
