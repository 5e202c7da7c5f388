import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.telemetry import health

NOW = 1000.0
GOOD = {"time": NOW - 1, "state": "training", "step": 5, "last_progress": NOW - 10, "limit_seconds": 60.0,
        "pid": os.getpid()}  # fmt: skip


@pytest.mark.parametrize(("change", "healthy", "text"), [
    ({}, True, "training at step 5"),
    ({"last_progress": NOW - 61}, False, "no progress for 1 min 1 s, limit 1 min"),
    ({"last_progress": NOW - 61, "limit_seconds": None}, True, "last progress 1 min 1 s ago"),
    ({"time": NOW - 20}, False, "last heartbeat 20 s ago"),
    ({"time": NOW + 50, "last_progress": NOW + 50}, True, "last progress 0 s ago"),
    ({"pid": 2**22 + 5}, False, "is gone"),
    ({"pid": 0}, False, "is gone"),
    ({"state": "failed"}, False, "failed"),
    ({"state": "succeeded", "time": 0}, True, "succeeded"),
])  # fmt: skip
def test_judge(change: dict[str, object], healthy: bool, text: str) -> None:
    verdict, line = health.judge(GOOD | change, NOW)
    assert verdict is healthy and text in line and "\n" not in line


def test_what_is_written_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"TANDEM_STATE_DIR": str(tmp_path)}
    assert health.main(environ) == 1
    now = time.time()
    health.write_health(tmp_path, health.record("training", 3, now, 9))
    assert health.main(environ) == 0
    for bad in ("", "[]", "{}", "5", '{"time": "x"}', "[" * 50_000, '{"state":"a","step":NaN}'):
        (tmp_path / "health.json").write_text(bad)
        assert health.main(environ) == 1
    assert health.main({}) == 1
    output = capsys.readouterr()
    assert output.out.count("\n") == 10 and output.err == ""


def test_it_imports_little() -> None:
    heavy = "{'torch', 'prometheus_client', 'logging'}"
    code = f"import sys, tandem.telemetry.health; print(len({heavy} & set(sys.modules)))"
    source = os.path.join(os.path.dirname(health.__file__), "..", "..")
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, timeout=20,
                          env={"PYTHONPATH": source})  # fmt: skip
    assert done.stdout == "0\n", done.stderr
