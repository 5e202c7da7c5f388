"""Launches with a slow loader and a slow rank: page, summary and report name it."""

import json
import urllib.request
from typing import Any

import pytest
from small_runs import Runs

from patience import patient
from program_files import program_text
from tandem.report.report import read_run

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]
NEVER = ("--eval-every", "never", "--checkpoint-every", "never")
FLAGS = ("--nproc", 2, "--log-every", 20, "--threads", 1, *NEVER)


def ended(runs: Runs, task: str, steps: int, delay: float, port: int) -> tuple[dict[str, Any], str]:
    """What a finished run's summary has, and its output; the page and the report say the same."""
    (runs.folder / "tasks.py").write_text(program_text("verdict_tasks"))
    asked = ["--task", task, "--steps", steps, "--metrics", port]
    process = runs.start("launch", "run", *FLAGS, *asked, delay=delay)
    said = list[str]()

    def has_ended() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/run", timeout=patient(5)) as answer:
                said.append(json.loads(answer.read())["verdict"])
        except OSError:
            pass  # it is not there yet, or no longer
        return process.poll() is not None

    runs.until(has_ended, "end")
    code, output = runs.processes.wait(process)
    assert code == 0, output
    summary = runs.summary("run")
    assert read_run(runs.folder / "run")["verdict"] == summary.get("verdict")
    assert "verdict" not in summary or any(said), "the page has it while the run trains"
    return summary, output


def test_a_slow_loader(runs: Runs, free_port: int) -> None:
    summary, output = ended(runs, "tasks.py:SlowLoader", 400, 0.0, free_port)
    assert summary["verdict"].startswith("data: ") and "try --workers 2" in summary["verdict"]
    assert f"what limits this run: {summary['verdict']}" in output
    assert summary["state"] == "finished" and summary["weights_sha256"], "the rest of the summary is kept"


def test_a_slow_rank(runs: Runs, free_port: int) -> None:
    summary, _ = ended(runs, "tasks.py:SlowRank", 400, 0.03, free_port)
    assert summary["verdict"].startswith("slow rank: ") and "rank 1 on node 0" in summary["verdict"]
    assert "forward" in summary["verdict"]


def test_a_healthy_run(runs: Runs, free_port: int) -> None:
    summary, output = ended(runs, "small.py:Small", 150, 0.1, free_port)
    assert "verdict" not in summary and "what limits" not in output
