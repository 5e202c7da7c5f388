"""benchmarks/block_reads.py with few samples and without peers: each row has a figure or a reason."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "block_reads.py"


@pytest.mark.timeout(300)
def test_readers_agree_and_missing_peers_are_rows(tmp_path: Path, processes: Any) -> None:
    pytest.importorskip("pyarrow")
    found = tmp_path / "found.json"
    flags = ["--rounds", "1", "--samples", "512", "--remote-samples", "512"]
    flags += ["--peers-python", str(tmp_path / "none")]
    command = [sys.executable, str(PROGRAM), *flags, "--json", str(found)]
    code, said = processes.run(command, limit=280, cwd=tmp_path)
    assert code in (0, 1) and found.exists(), said
    rows = json.loads(found.read_text())["rows"]
    compared = [row for row in rows if row["trials"]]
    others = [row for row in rows if not row["trials"]]
    assert len(rows) == 14 and all(" times" in row["ratio"] for row in compared)
    about = {row["control"].partition(" ")[0] for row in compared}
    assert {"Python's", "pyarrow's"} <= about and all(row["seconds"] > 0 for row in compared)
    assert all(row["passed"] is None for row in others), "readers agree on the samples"
    assert sum("not installed" in row["control"] for row in others) >= 5
