"""Random numbers that a program draws for its data and its model, without a seed of its own."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = pytest.mark.multi


def launched(processes: Any, folder: Path, run: str, *words: str) -> str:
    own = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--threads", "1", "--nproc", "2"]
    command = [sys.executable, "-m", "tandem", "launch", "--run-dir", run, *quiet, *words]
    code, output = processes.run(command, cwd=folder, env=own)
    assert code == 0, output
    return str(output)


def test_a_tasks_split_is_the_same_in_every_start(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(program_text("random_splits_task"))
    flags = ["--task", "task.py:Splits", "--batch-size", "16", "--lr", "0.01", "--schedule", "constant"]
    launched(processes, tmp_path, "calm", *flags, "--epochs", "4")
    launched(processes, tmp_path, "run", *flags, "--epochs", "2")
    launched(processes, tmp_path, "run", *flags, "--epochs", "4")
    calm, run = (json.loads((tmp_path / each / "summary.json").read_text()) for each in ("calm", "run"))
    assert run["weights_sha256"] == calm["weights_sha256"]
    assert run["eval"] == calm["eval"]


def test_a_loops_rows_are_the_same_on_all_ranks_and_in_every_start(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(program_text("random_splits_loop"))
    seen = []
    for run in ("one", "two"):
        launched(processes, tmp_path, run, "loop.py")
        logs = [(tmp_path / run / "log" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
        seen += [line for log in logs for line in log.splitlines() if "rows:" in line]
    assert len(seen) == 4 and len({line.partition("rows:")[2] for line in seen}) == 1
