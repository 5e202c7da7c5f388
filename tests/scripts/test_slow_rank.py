"""A rank of a script that holds the others back, on real processes: named by rank, node and line."""

import json
import re
import urllib.request
from typing import Any

import pytest

from patience import patient
from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

SCRIPT = program_text("slow_rank_script")
LINE = next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if "# here" in line)


def test_a_slow_rank_of_a_script_is_named_with_its_line(scripts: Any, free_port: int) -> None:
    (scripts.folder / "slow.py").write_text(SCRIPT)
    events = scripts.folder / "run" / "events.jsonl"
    process = scripts.start(scripts.tandem("--nodes", 2, "--metrics", free_port, "slow.py"))
    scripts.until(lambda: events.exists() and '"straggler"' in events.read_text(), process)

    def read(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{free_port}{path}", timeout=patient(30)) as page:
            return str(page.read().decode())

    metrics, status = read("/metrics"), json.loads(read("/api/run"))
    (scripts.folder / "enough").touch()
    _, said = scripts.wait(process)
    assert re.search(r'^tandem_straggler_excess_seconds{node="1",phase="other",rank="1"} 0\.', metrics, re.M)
    assert [row["straggler"] for row in status["ranks"]] == [False, True], status["ranks"]
    line = rf"straggler: rank 1 on node 1 .*; most of it at slow\.py:{LINE}$"
    assert len(re.findall(line, said, re.M)) == 1, said
