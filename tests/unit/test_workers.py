"""Processes forked for a rank: a stop that comes before they have handlers is heard when they have."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from patience import patient
from program_files import program_text

STARTED_TOO_LATE = program_text("workers_started_too_late")
INTERRUPTED = program_text("workers_interrupted")
"""What torch's handler of SIGCHLD raises while the rank's own code deals with the first sign of that end."""
REPORTS = program_text("workers_reports")
DYING = "import os\nos._exit(1)\n"
AGENT = program_text("workers_agent")
STUCK = program_text("workers_stuck")
DELAYED = program_text("workers_delayed")
"""A busy machine: what is forked gets on only when the fork server, and its agent, are gone."""
ENDING = program_text("workers_ending")
"""A rank whose program has a fork server of its own: what comes from that is the program's."""
OWN_POOL = program_text("workers_own_pool")
OWN = program_text("workers_own")
"""The fork server is killed, as where memory is short, and its folder has a file of a library's name."""
AGAIN = program_text("workers_again")
"""Ranks whose GPU was opened in advance: generations in which the nodes have other places each time."""
BOUND = program_text("workers_bound")
GENERATIONS = program_text("workers_generations")
"""The job has another size: what stood by for a place that is no more makes room."""
RESIZED = program_text("workers_resized")
TEXTS = {"late": STARTED_TOO_LATE, "dying": DYING, "agent": AGENT, "stuck": STUCK}
TEXTS |= {"delayed": DELAYED, "ending": ENDING, "pool": OWN_POOL, "own": OWN, "again": AGAIN}
TEXTS |= {"hit": INTERRUPTED, "reports": REPORTS}
TEXTS |= {"bound": BOUND, "generations": GENERATIONS, "resized": RESIZED}
pytestmark = pytest.mark.timeout(110)


def agent(folder: Path, preload: str, program: str = "agent") -> subprocess.CompletedProcess[str]:
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
    search = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    with tempfile.TemporaryDirectory() as scratch:  # sockets lie in it: tmp_path may be too long for one
        command = [sys.executable, f"{program}.py", scratch, preload]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=patient(100)
        )


def test_a_stop_between_fork_and_handlers_is_not_lost(tmp_path: Path) -> None:
    done = agent(tmp_path, "late")
    assert done.stdout == "True {0: 143}\n", (done.stdout, done.stderr)


def test_a_fork_server_that_dies_is_one_line(tmp_path: Path) -> None:
    done = agent(tmp_path, "dying")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("200: the process that forks the ranks was killed ("), done.stderr


def test_a_standby_with_an_open_gpu_becomes_the_rank_of_that_gpu(tmp_path: Path) -> None:
    """Whatever its rank is by then; where a GPU has failed, new processes begin the next generation."""
    done = agent(tmp_path, "", "generations")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("[0, 1] 0", "[137, 137] 2"),
        *("[0, 1] 2", "[137, 137] 2"),
        *("[0, 1] 2", "[0, 134] 0"),
    ]


def test_what_stands_by_for_a_place_that_is_gone_makes_room(tmp_path: Path) -> None:
    """It was kept, and every restart after a change of size began with a new process."""
    done = agent(tmp_path, "", "resized")
    assert (done.returncode, done.stdout.split()) == (0, ["0", "0", "1"]), done.stderr


@pytest.mark.slow
def test_a_rank_that_does_not_end_when_it_is_killed_is_said(tmp_path: Path) -> None:
    """One whose GPU's driver hangs keeps its memory, and the next generation fails for want of it."""
    done = agent(tmp_path, "", "stuck")
    if "no ptrace" in done.stderr:
        pytest.skip("no process can be stopped on its way out here")
    assert done.returncode == 0, done.stderr
    codes, _, pid = done.stdout.strip().rpartition(" ")
    assert codes == "{0: 137, 1: 137}"
    said = [line for line in done.stderr.splitlines() if "after SIGKILL" in line]
    assert len(said) == 1 and said[0].startswith(f"rank 1 (process {pid}) has not exited 1 s after SIGKILL")


def test_a_standby_whose_agent_has_just_ended_does_not_warm_up(tmp_path: Path) -> None:
    """It holds the agent's output, and who reads that waits for all that a program has imported."""
    done = agent(tmp_path, "delayed", "ending")
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "asked").exists() and not (tmp_path / "warmed").exists()


@pytest.mark.slow
def test_a_ranks_own_fork_server_is_not_deaf_and_has_nothing_of_ours(tmp_path: Path) -> None:
    """What it forked ignored SIGTERM, so a pool's end never came, and each server imported torch anew."""
    done = agent(tmp_path, "", "own")
    assert done.stdout == "[] True\n-15\n", (done.stdout, done.stderr)


def test_a_fork_server_that_is_started_anew_runs_no_file_of_the_current_folder(tmp_path: Path) -> None:
    done = agent(tmp_path, "", "again")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "here" / "was-run").exists(), done.stderr


def test_a_killed_loader_process_is_one_whatever_the_rank_is_at(tmp_path: Path) -> None:
    done = agent(tmp_path, "hit", "reports")
    assert done.stdout == "True {0: 137}\n", (done.stdout, done.stderr)
