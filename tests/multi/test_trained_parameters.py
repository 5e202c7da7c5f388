"""A task that freezes or unfreezes layers, but not in its method freeze."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = pytest.mark.multi


@pytest.mark.parametrize("task, how", [("Unfreezes", "unfrozen"), ("Freezes", "frozen")])
def test_layers_that_are_trained_or_frozen_later_are_named(
    task: str, how: str, processes: Any, tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(program_text("trained_parameters_task"))
    own = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--threads", "1", "--nproc", "2"]
    flags = ["--run-dir", "run", "--batch-size", "16", "--epochs", "2", *quiet]
    command = [sys.executable, "-m", "tandem", "launch", "--task", f"task.py:{task}", *flags]
    code, output = processes.run(command, cwd=tmp_path, env=own)
    assert code == 2, output
    assert f"gradients of this step, because 0.weight, 0.bias were {how} after training began" in output
    assert "freeze(model, epoch)" in output and "Traceback" not in output
