"""A rank with loader processes ends at once when it fails, and starts again when one of them is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from needs import require
from patience import patient
from program_files import program_text
from tree import of_launch

pytestmark = pytest.mark.timeout(300)

TASK = program_text("failing_loaders_task")
LOOP = program_text("failing_loaders_loop")
SCRIPT = program_text("failing_loaders_script")
LOADERS = ("--workers", 1, "--batch-size", 24, "--steps", 30)


@pytest.fixture
def loaded(runs: Runs) -> Runs:
    (runs.folder / "loaded.py").write_text(TASK)
    (runs.folder / "loop.py").write_text(LOOP)
    (runs.folder / "script.py").write_text(SCRIPT)
    return runs


def launch(runs: Runs, *words: object) -> tuple[int, str]:
    command = [sys.executable, "-m", "tandem", "launch", "--metrics", "0", "--metrics-linger", "0"]
    command += ["--run-dir", "run", *map(str, words)]
    return runs.processes.wait(runs.processes.start(command, cwd=runs.folder, env=runs.environment))


@pytest.mark.parametrize(
    "mistake",
    [
        ("--task.broken", 100),
        pytest.param(("--task.broken", 100, "--seed", 3, "--batch-size", 480), marks=pytest.mark.soak),
        pytest.param(("--task.fails_at", 7), marks=pytest.mark.soak),
    ],
    ids=["loader", "first batch", "task"],
)
def test_an_error_ends_a_rank_with_loader_processes(loaded: Runs, mistake: tuple[object, ...]) -> None:
    """Its processes are deaf to SIGTERM, and it waited for them for ever: a hang, five times over."""
    code, said = launch(loaded, "--nproc", 2, *LOADERS, *mistake, "--task", "loaded.py:Loaded")
    assert code == 1, said
    assert ("OSError" if "broken" in str(mistake[0]) else "a mistake of the task") in said
    assert "hang" not in said and "restarting all ranks" not in said, said


def test_a_mistake_that_a_loader_process_finds_ends_with_its_own_code(loaded: Runs) -> None:
    """While the rank ended the other processes, torch took their end for an error of the rank: code 1."""
    words = ("--workers", 2, "--batch-size", 24, "--steps", 30, "--task.absent", 100)
    code, said = launch(loaded, "--nproc", 1, *words, "--task", "loaded.py:Loaded")
    assert code == 2 and "sample 100 is None" in said, said


@pytest.mark.parametrize(
    ("limit", "width", "expected"),
    [("-Sn 300", 20_000, 0), ("-n 300", 20_000, 2), ("-n 300", 8, 0)],
    ids=["soft", "hard", "small tensors"],
)
def test_a_batch_may_have_more_tensors_than_a_shell_allows_files(
    loaded: Runs, limit: str, width: int, expected: int
) -> None:
    """torch's error was "received 0 items of ancdata", or an EOFError without a message."""
    words = ("--workers", 2, "--batch-size", 120, "--steps", 8, "--task", "loaded.py:ManyTensors")
    words += ("--task.width", width)
    command = ["bash", "-c", f'ulimit {limit}; exec "$@"', "-", sys.executable, "-m", "tandem", "launch"]
    command += ["--metrics", "0", "--metrics-linger", "0", "--run-dir", "run", *map(str, words)]
    process = loaded.processes.start(command, cwd=loaded.folder, env=loaded.environment)
    code, said = loaded.processes.wait(process)
    assert code == expected, said
    assert ("stack them in collate" in said and "may open 300" in said) == bool(expected), said


def test_a_small_dev_shm_is_named_with_its_size(loaded: Runs) -> None:
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True)
    require("namespaces", tried.returncode == 0)
    words = ("--workers", 2, "--batch-size", 240, "--steps", 8, "--task.width", 2000)
    command = ["unshare", "--mount", "bash", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm; exec "$@"', "-"]
    command += [sys.executable, "-m", "tandem", "launch", "--metrics", "0", "--metrics-linger", "0"]
    command += ["--run-dir", "run", *map(str, words), "--task", "loaded.py:Loaded"]
    process = loaded.processes.start(command, cwd=loaded.folder, env=loaded.environment)
    code, said = loaded.processes.wait(process)
    assert code == 2 and "/dev/shm is full (1 MiB)" in said and "--shm-size" in said, said


def test_an_error_is_final_although_the_ranks_that_lost_it_end_first(loaded: Runs) -> None:
    code, said = launch(loaded, "--nproc", 2, "--batch-size", 24, "--task", "loaded.py:EndsLate")
    assert code == 1 and "a mistake of the task" in said and "restarting all ranks" not in said, said


def test_an_error_ends_a_loop_of_ones_own_with_loader_processes(loaded: Runs) -> None:
    code, said = launch(loaded, "--workers", 1, "loop.py", 100, -1)
    assert code == 1 and "/data/100.jpg" in said, said


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc", 2, *LOADERS, "--task.killed", 100, "--task", "loaded.py:Loaded"),
        pytest.param(("--workers", 1, "loop.py", -1, 100), marks=pytest.mark.soak),
        ("--nproc", 2, "script.py"),
    ],
    ids=["task", "loop", "script"],
)
def test_a_killed_loader_process_is_a_killed_rank(loaded: Runs, words: tuple[object, ...]) -> None:
    code, said = launch(loaded, *words)
    assert code == 0, said
    assert loaded.summary("run")["restarts"] == 1
    assert "SIGKILL" in said


def test_a_loader_process_may_be_killed_at_any_moment(loaded: Runs) -> None:
    """From outside, while it waits, while its rank computes: TANDEM_TRIALS times."""
    trials = int(os.environ.get("TANDEM_TRIALS", "3"))
    flags = ("--workers", 2, "--batch-size", 24, "--steps", 10_000_000, "--checkpoint-every", "5s")
    command = [sys.executable, "-m", "tandem", "launch", "--metrics", "0", "--metrics-linger", "0"]
    command += ["--run-dir", "run", *map(str, flags), "--task", "loaded.py:Loaded"]
    command += ["--max-restarts", "1000"]
    process = loaded.processes.start(command, cwd=loaded.folder, env=loaded.environment)
    for number in range(trials):
        loaded.until(lambda n=number: len(loaded.events("run", "training")) > n, "step")
        loaded.until(lambda: len(_loaders(process)) == 2, "loader processes")
        os.kill(_loaders(process)[number % 2], signal.SIGKILL)
        loaded.until(lambda n=number: len(loaded.events("run", "rank_killed")) > n, "restart", patient(30))
    process.terminate()
    code, said = loaded.processes.wait(process)
    assert code == 143, said
    assert loaded.summary("run")["restarts"] == trials


def _loaders(process: Any) -> list[int]:
    return [pid for pid, name in of_launch(process.pid).items() if name == "pt_data_worker"]


def test_loader_processes_end_with_a_lone_rank_that_is_killed(loaded: Runs) -> None:
    flags = ("--workers", 2, "--batch-size", 24, "--steps", 10_000_000)
    command = [sys.executable, "-m", "tandem", "train", "--metrics", "0", "--metrics-linger", "0"]
    command += ["--run-dir", "run", *map(str, flags), "--task", "loaded.py:Loaded"]
    process = loaded.processes.start(command, cwd=loaded.folder, env=loaded.environment)
    loaded.until(lambda: len(_loaders(process)) == 2, "loader processes")
    # A first step has been made: the loader processes have begun, and have asked to end with their rank.
    loaded.until((loaded.folder / "run/metrics.jsonl").exists, "first step")
    for pid in _loaders(process):
        os.kill(pid, signal.SIGSTOP)  # torch's own look at its parent does not count
    process.kill()
    loaded.until(lambda: not of_launch(process.pid), "end of all", limit=10)
    assert not Path(f"/proc/{process.pid}/environ").exists() or process.wait() != 0
