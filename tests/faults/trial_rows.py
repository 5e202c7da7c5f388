"""The rows of benchmarks/store_trials.py, run in a process of its own with TANDEM_TRIALS trials."""

import json
import os
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "store_trials.py"
SOURCE = Path(__file__).parents[2] / "src"
TRIALS = int(os.environ.get("TANDEM_TRIALS") or 5)


def rows(processes: Any, folder: Path, name: str, trials: int) -> dict[str, dict[str, Any]]:
    """The rows of one kind of trial, by name."""
    found = folder / "rows.json"
    command = [sys.executable, str(PROGRAM), name, "--trials", str(trials), "--json", str(found)]
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    code, output = processes.run(command, limit=240, env={**os.environ, "PYTHONPATH": path})
    assert code in (0, 1), output
    return {row["name"]: row for row in json.loads(found.read_text())["rows"]}
