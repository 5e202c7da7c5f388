"""Folders of runs that somebody hostile has filled, over every command that reads them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient

PROGRAM = Path(__file__).parents[1] / "hostile_runs.py"
COUNT = int(os.environ.get("HOSTILE_RUNS", "200"))


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(30, 1), pytest.param(COUNT, 2, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_every_command_ends_with_a_line_and_shows_nothing_from_outside(count: int, seed: int) -> None:
    command = [sys.executable, str(PROGRAM), "--count", str(count), "--seed", str(seed)]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(600), env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["wrong"] == []
    did = {name: number for name, number in found["did"].items() if name != "eval"}  # none has a task to run
    assert min(found["calls"].values()) >= count and min(did.values()) > 0
