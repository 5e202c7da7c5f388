"""`--json` of the verbs that start runs: one line of JSON on standard output, progress on standard error."""

import json
import subprocess
import sys
from typing import Any

import pytest
from small_runs import Runs

from patience import patient

pytestmark = pytest.mark.timeout(300)
SMALL = ["--task", "small.py:Small", "--batch-size", "24", "--device", "cpu"]


def run(runs: Runs, *words: str) -> tuple[int, Any, str]:
    done = subprocess.run(
        [sys.executable, "-m", "tandem", *words, *SMALL, "--json"],
        cwd=runs.folder,
        env=runs.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(250),
        check=False,
    )
    (line,) = done.stdout.splitlines() or [done.stderr]
    return done.returncode, json.loads(line), done.stderr


def test_check(runs: Runs) -> None:
    code, found, said = run(runs, "check")
    assert (code, found["sound"], found["task"]) == (0, True, "small.py:Small"), said
    assert {each["level"] for each in found["findings"]} <= {"ok", "note"} and "1 of 4" in said


def test_verify_resume(runs: Runs) -> None:
    code, found, said = run(runs, "verify-resume", "--trials", "1", "--nproc", "1", "--task.delay", "0.01")
    assert (code, found["exact"], len(found["trials"])) == (0, True, 1), said
    assert found["trials"][0]["kills"] and found["ranks"] == 1 and "verdict: exact" in said


def test_bench(runs: Runs) -> None:
    code, found, said = run(runs, "bench", "--compare", "single", "--rounds", "1", "--steps", "25")
    assert (code, found["reference"]) == (0, "single") and "round 1 of 1" in said
