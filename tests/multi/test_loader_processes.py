"""`--workers auto` in a run: what the CPUs allow, said once, and the bits of a run without any."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = pytest.mark.multi

TASK = program_text("loader_processes_task")


def train(processes: Any, folder: Path, *flags: str, task: str = "Loaded") -> tuple[str, str]:
    """The digest of the weights, and what was said, of one rank."""
    (folder / "loaded.py").write_text(TASK)
    code, output = processes.run(
        [sys.executable, "-m", "tandem", "train", "--task", f"loaded.py:{task}", "--batch-size", "8",
         "--epochs", "2", "--device", "cpu", "--metrics", "0", "--metrics-linger", "0",
         "--run-dir", "-".join(["run", *flags]), *flags],
        cwd=folder, env={name: value for name, value in os.environ.items() if name[:6] != "TANDEM"},
    )  # fmt: skip
    assert code == 0, output
    summary = json.loads((folder / "-".join(["run", *flags]) / "summary.json").read_text())
    return str(summary["weights_sha256"]), output


@pytest.mark.soak
def test_workers_by_themselves_change_no_bit(processes: Any, tmp_path: Path) -> None:
    alone, said = train(processes, tmp_path)
    assert "--workers auto" not in said
    loaded, said = train(processes, tmp_path, "--workers", "auto")
    assert said.count("--workers auto: ") == 1 and "per rank, which has" in said
    assert loaded == alone


def test_workers_read_the_rows_of_a_file_that_the_dataset_has_opened(processes: Any, tmp_path: Path) -> None:
    """They shared the position in the file with each other, and each read what another had sought."""
    alone, _ = train(processes, tmp_path, task="Opened")
    loaded, _ = train(processes, tmp_path, "--workers", "2", task="Opened")
    assert loaded == alone
