"""NCCL's watchdog aborts a rank that has lost a peer: neither a failed GPU, nor an incident of its node."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TASK = program_text("aborted_ranks_task")


def test_an_abort_for_a_lost_peer_spends_no_budget(processes: Any, tmp_path: Path) -> None:
    """Each node has one killed rank, and one aborted: with a budget of one, the abort must not count."""
    (tmp_path / "aborting.py").write_text(TASK)
    words = ["--nodes", 2, "--task", "aborting.py:Aborting", "--batch-size", 24, "--steps", 12]
    words += ["--max-restarts", 1, "--device", "cpu", "--eval-every", "never", "--metrics", 0]
    words += ["--metrics-linger", 0, "--run-dir", "run"]
    command = [sys.executable, "-m", "tandem", "launch", *map(str, words)]
    code, said = processes.run(command, cwd=tmp_path)
    assert code == 0, said
    assert "rank 1 on node 1 was killed (SIGKILL)" in said and "rank 0 on node 0 was killed (SIGKILL)" in said
    assert "SIGABRT" not in said and "budget" not in said, said
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    killed = [(each["rank"], each["signal"]) for each in events if each["kind"] == "rank_killed"]
    assert killed == [(1, "SIGKILL"), (0, "SIGKILL")]
