"""Scripts of others' frameworks: a killed and a stopped rank, what the page says of it, and a stop."""

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import Any

import pytest
from unchanged import PROGRAMS

from patience import patient

pytestmark = [pytest.mark.multi, pytest.mark.timeout(900)]


@pytest.mark.parametrize("program, package", [
    ("with_accelerate.py", "accelerate"),
    pytest.param("with_lightning.py", "lightning", marks=pytest.mark.soak),
])  # fmt: skip
def test_a_killed_and_a_stopped_rank(
    program: str, package: str, scripts: Any, require: Any, free_port: int
) -> None:
    python = os.environ.get("FRAMEWORKS_PYTHON") or sys.executable
    look = f"import importlib.util as util; exit(util.find_spec('{package}') is None)"
    found = subprocess.run([python, "-c", look], check=False).returncode == 0
    require("frameworks", found, f"no package {package}: make frameworks")
    scripts.python = python
    ours = scripts.tandem("--nodes", 2, "--hang-timeout", patient(6), "--metrics", free_port)
    process = scripts.start([*ours, str(PROGRAMS / program), "--epochs", "1000000", "--pause", "0.05"])

    def page() -> str:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{free_port}/metrics", timeout=patient(10)
            ) as answer:
                return str(answer.read().decode())
        except OSError:
            return ""

    def lives() -> int:
        return min(len(scripts.lives(0)), len(scripts.lives(1)))

    def steps() -> object:
        return re.search(r"^tandem_global_step [1-9]", page(), re.M)

    for number, (rank, sent) in enumerate([(1, signal.SIGKILL), (0, signal.SIGSTOP)], 1):
        scripts.until(lambda number=number: lives() == number and steps(), process)
        os.kill(scripts.lives(rank)[-1], sent)
    scripts.until(lambda: lives() == 3 and steps(), process)
    text = page()
    for series in ('restarts_total{reason="crash"} 1', 'restarts_total{reason="hang"} 1', "world_size 2"):
        assert re.search(rf"^tandem_{re.escape(series)}", text, re.M), (series, text)
    assert all(f'tandem_rank_memory_bytes{{node="{rank}",rank="{rank}"}}' in text for rank in (0, 1)), text
    process.send_signal(signal.SIGTERM)
    code, said = scripts.wait(process)
    # Lightning's ranks do not agree on the step to stop after: seldom they wait for each other for ever.
    is_race = package == "lightning" and "error: hang: " in said.partition("SIGTERM: asking")[2]
    assert code == (137 if is_race else 143), said
    who = r"hang: rank 0 on node 0 \(127\.0\.0\.101\) has .+ for [\d.]+ s "
    assert re.search(rf"{who}\(phase {re.escape(program)}:\d+, step \d+\)", said), said
    summary = json.loads((scripts.folder / "run" / "summary.json").read_text())
    end = ("failed", 137) if is_race else ("stopped", 143)
    assert (summary["state"], summary["exit_code"], summary["restarts"]) == (*end, 2)
