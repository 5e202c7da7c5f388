"""A rank with loader processes ends at once when it fails, and starts again when one of them is killed."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from patience import patient
from tree import of_launch

pytestmark = pytest.mark.timeout(300)

TASK = """
import os, time
from dataclasses import dataclass
from small import Small
from torch.utils.data import Dataset
import torch
from torch import nn
from tandem.data.datasets import Datasets

class Rows(Dataset):
    def __init__(self, broken, killed):
        self.broken, self.killed = broken, killed
    def __len__(self):
        return 480
    def __getitem__(self, index):
        if index == self.broken:
            raise OSError(5, "Input/output error", "/data/100.jpg")
        if index == self.killed and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        return torch.full((8,), float(index)), index % 2

@dataclass
class EndsLate:
    # rank 0 ends as one that has lost rank 1, which takes a second longer
    calls: int = 0
    def build_model(self):
        return nn.Linear(8, 2)
    def build_datasets(self):
        return Datasets(Rows(-1, -1), None)
    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 5 and torch.distributed.get_rank() == 0:
            os._exit(200)
        if self.calls == 5:
            time.sleep(1)
            raise ValueError("a mistake of the task")
        return nn.functional.cross_entropy(model(batch[0] / 480), batch[1])

@dataclass
class Loaded:
    broken: int = -1
    killed: int = -1
    fails_at: int = -1
    calls: int = 0
    def build_model(self):
        return nn.Linear(8, 2)
    def build_datasets(self):
        return Datasets(Rows(self.broken, self.killed), None)
    def loss(self, model, batch):
        self.calls += 1
        if self.calls == self.fails_at:
            raise ValueError("a mistake of the task")
        return nn.functional.cross_entropy(model(batch[0] / 480), batch[1])
"""
LOOP = """
import sys
import tandem, torch
from torch import nn
from loaded import Rows
run = tandem.start()
model = run.wrap(nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run.keep(model=model, optimizer=optimizer)
for x, y in run.batches(Rows(int(sys.argv[1]), int(sys.argv[2])), batch_size=24, steps=30):
    optimizer.zero_grad()
    run.backward(nn.functional.cross_entropy(model(x / 480), y))
    optimizer.step()
print("the end", flush=True)
"""
SCRIPT = """
import os, torch
from loaded import Rows
from torch.utils.data import DataLoader
if os.environ["RANK"] == "0":
    for _ in DataLoader(Rows(-1, 100), batch_size=8, num_workers=2):
        pass
"""
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


def test_an_error_is_final_although_the_ranks_that_lost_it_end_first(loaded: Runs) -> None:
    code, said = launch(loaded, "--nproc", 2, "--batch-size", 24, "--task", "loaded.py:EndsLate")
    assert code == 1 and "a mistake of the task" in said and "restarting all ranks" not in said, said


@pytest.mark.slow
def test_an_error_ends_a_loop_of_ones_own_with_loader_processes(loaded: Runs) -> None:
    code, said = launch(loaded, "--workers", 1, "loop.py", 100, -1)
    assert code == 1 and "/data/100.jpg" in said, said


@pytest.mark.parametrize(
    "words",
    [
        ("--nproc", 2, *LOADERS, "--task.killed", 100, "--task", "loaded.py:Loaded"),
        pytest.param(("--workers", 1, "loop.py", -1, 100), marks=pytest.mark.soak),
        pytest.param(("--nproc", 2, "script.py"), marks=pytest.mark.slow),
    ],
    ids=["task", "loop", "script"],
)
def test_a_killed_loader_process_is_a_killed_rank(loaded: Runs, words: tuple[object, ...]) -> None:
    code, said = launch(loaded, *words)
    assert code == 0, said
    assert loaded.summary("run")["restarts"] == 1
    assert "SIGKILL" in said


@pytest.mark.slow
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


@pytest.mark.slow
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
