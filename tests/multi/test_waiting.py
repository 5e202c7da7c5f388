"""Threads of OpenMP sleep while they wait, in whatever computes; what somebody has set himself counts.

libgomp says what it goes by when torch loads it, which is the only time that it looks.
"""

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

TASK = Path(__file__).parents[2] / "examples" / "my_task.py"
SHORT = ["--steps", 2, "--metrics", 0, "--progress", "off", "--threads", 1]
SCRIPT = "import torch; print('a script', torch.ones(2).sum().item())\n"
OWN_SPINS = {"GOMP_SPINCOUNT": "700"}
OWN_POLICY = {"OMP_WAIT_POLICY": "active"}

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]


def spins(processes: Any, folder: Path, words: list[object], own: dict[str, str]) -> list[int]:
    """How often a thread looks before it sleeps, in each process that has loaded libgomp."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment = kept | {"OMP_DISPLAY_ENV": "VERBOSE"} | own
    command = [sys.executable, "-m", "tandem", *map(str, words)]
    code, said = processes.run(command, cwd=folder, env=environment)
    assert code == 0, said
    return [int(each) for each in re.findall(r"GOMP_SPINCOUNT = '(\d+)'", said)]


def test_ranks_under_an_agent_wait_passively_unless_told_otherwise(processes: Any, tmp_path: Path) -> None:
    words = ["launch", "--nproc", 2, "--task", f"{TASK}:MyTask", *SHORT, "--run-dir"]
    assert spins(processes, tmp_path, [*words, "calm"], {}) == [0]
    assert min(spins(processes, tmp_path, [*words, "busy"], OWN_POLICY)) > 1_000_000


@pytest.mark.soak
def test_all_nodes_of_a_laptop_are_forked_from_one_process_that_has_torch(
    processes: Any, tmp_path: Path
) -> None:
    words = ["launch", "--nodes", 3, "--task", f"{TASK}:MyTask", *SHORT, "--batch-size", 240]
    words += ["--run-dir", "run"]
    assert spins(processes, tmp_path, list(words), {}) == [0]
    assert "3 ranks on 3 nodes" in (tmp_path / "run" / "log" / "rank-0.log").read_text()


@pytest.mark.soak
def test_a_lone_rank_and_an_evaluation_wait_passively(processes: Any, tmp_path: Path) -> None:
    words = ["train", "--task", f"{TASK}:MyTask", *SHORT, "--run-dir", "run"]
    assert spins(processes, tmp_path, list(words), {}) == [0]
    assert spins(processes, tmp_path, ["eval", "run"], {}) == [0]
    assert spins(processes, tmp_path, ["eval", "run"], OWN_SPINS) == [700]


@pytest.mark.soak
def test_scripts_wait_passively(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["launch", "--metrics", 0, "--progress", "off", "--run-dir", "run", "script.py"]
    assert set(spins(processes, tmp_path, list(words), {})) == {0}
