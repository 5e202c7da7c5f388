"""A run under steady fire ends with the weights of an undisturbed one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "chaos_trials.py"


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_twenty_mixed_faults_leave_no_trace(tmp_path: Path, processes: Any) -> None:
    found = tmp_path / "rows.json"
    command = [sys.executable, str(PROGRAM), "--faults", "20", "--every", "1", "--json", str(found)]
    code, said = processes.run(command, limit=560)
    assert code in (0, 1), said  # so short a run says little of goodput
    (row,) = json.loads(found.read_text())["rows"]
    assert row["trials"] >= 15, row
    assert "weights equal" in row["outcome"], row
