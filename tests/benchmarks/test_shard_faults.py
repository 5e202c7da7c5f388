"""benchmarks/shard_faults.py with few shards and without peers: what tandem returns, and a row each."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "shard_faults.py"
RIGHT = ("none", "500", "reset")
REFUSED = {"no-ranges": "ranges", "flip": "00007.tar", "404": "00007.tar"}


@pytest.mark.timeout(300)
def test_tandem_is_right_or_refuses_by_name(tmp_path: Path, processes: Any) -> None:
    found = tmp_path / "found.json"
    flags = ["--shards", "20", "--only", *RIGHT, *REFUSED, "--peers-python", str(tmp_path / "none")]
    command = [sys.executable, str(PROGRAM), *flags, "--json", str(found)]
    code, said = processes.run(command, limit=280, cwd=tmp_path)
    assert code == 0, said
    results = json.loads(found.read_text())
    runs = {run["fault"]: run for run in results["runs"]}
    assert set(runs) == {*RIGHT, *REFUSED} and all(run["reader"] == "tandem" for run in runs.values())
    for fault in RIGHT:
        assert runs[fault]["outcome"] == "right", runs[fault]
        assert runs[fault]["counts"] == {"right": 240, "wrong": 0, "missing": 0, "twice": 0}
    for fault, word in REFUSED.items():
        assert runs[fault]["outcome"] == "refused by name" and word in runs[fault]["error"], runs[fault]
        counts = runs[fault]["counts"]
        assert counts["wrong"] == counts["twice"] == 0 and counts["right"] + counts["missing"] == 240
    assert all(row["passed"] and row["control"].count("not installed") == 6 for row in results["rows"])
