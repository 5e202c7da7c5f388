"""benchmarks/thousand_ranks.py, with few ranks: every part has its row."""

import json
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "thousand_ranks.py"


def test_every_part_has_a_row(processes: Any, tmp_path: Path) -> None:
    found = tmp_path / "rows.json"
    few = ("--ranks", "32", "--per-node", "2", "--samples", "40000", "--json", str(found))
    code, said = processes.run([sys.executable, str(PROGRAM), *few])
    assert code in (0, 1), said  # 1: too slow on a busy machine
    names = [row["name"] for row in json.loads(found.read_text())["rows"]]
    for part in ("placement", "consensus", "straggler", "page", "heartbeats", "keep-alive", "order of"):
        assert any(part in name for name in names), part
