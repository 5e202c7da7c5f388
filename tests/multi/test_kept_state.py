"""What a script or a task keeps, through kills and resumes: NumPy's, each rank's own, and what changed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from own_loops import Scripts

from program_files import program_text
from tandem.checkpoint.store import CheckpointStore

pytestmark = [pytest.mark.multi, pytest.mark.timeout(250)]

NUMPY = program_text("kept_state_numpy")
PER_RANK = """
import os
import numpy as np, torch, tandem
from torch import nn

class Env:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.x = self.rng.normal(size=8).astype(np.float32)
    def step(self):
        self.x = self.x * np.float32(0.9) + self.rng.normal(size=8).astype(np.float32)
    def state_dict(self):
        return {"x": self.x, "rng": self.rng.bit_generator.state}
    def load_state_dict(self, state):
        self.x, self.rng.bit_generator.state = state["x"], state["rng"]

def redistribute(states, rank, ranks):
    print("redistributed", len(states), "to", rank, "of", ranks)
    return states[rank % len(states)]

run = tandem.start()
model = run.wrap(nn.Linear(8, 1))
opt = torch.optim.Adam(model.parameters(), 0.01)
env, buffer, noise = Env(100 + run.rank), torch.zeros(16, 8), torch.Generator().manual_seed(run.rank)
own = {"env": env, "buffer": buffer, "noise": noise, "count": 0}
more = {"redistribute": redistribute} if "redistribute" in os.environ else {}
if "NAMED" in os.environ:
    kept = run.keep(model=model, opt=opt, per_rank=own, **more)
else:
    kept = run.keep(model=model, opt=opt, **own)
first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
for _ in run.batches(range(6 * 40), batch_size=6, steps=int(os.environ["STEPS"])):
    if first_life and run.rank == 1 and run.step == int(os.environ.get("DIE_AT", -1)):
        os.kill(os.getpid(), 9)
    env.step()
    buffer[run.step % 16] = torch.from_numpy(env.x)
    kept.count += 1 + run.rank
    rows = buffer[torch.randint(0, 16, (4,), generator=noise)]
    run.backward((model(rows) - kept.count / 100).square().mean())
    opt.step()
    opt.zero_grad()
"""
LIMIT = 100.0


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("numpy_loop.py", NUMPY)
    scripts.write("own.py", PER_RANK)
    return scripts


def launched(scripts: Scripts, script: str, run: str, *flags: object, **more: object) -> tuple[int, str]:
    """Exit code and output of `tandem launch` with two ranks, unless `flags` say otherwise."""
    words = ["--nproc", "2", "--checkpoint-every", "10", *map(str, flags)]
    return scripts.processes.wait(scripts.launch(words, script, run, **{"STEPS": 40, **more}), LIMIT)


def weights(scripts: Scripts, run: str) -> str:
    return str(scripts.summary(run)["weights_sha256"])


def errors_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if " | error: " in line or line.startswith("tandem: ")]


def test_numpy_values_survive_a_kill_before_the_first_checkpoint(scripts: Scripts) -> None:
    never = "--checkpoint-every", "never"
    code, output = launched(scripts, "numpy_loop.py", "calm", *never)
    assert code == 0 and "ended with ndarray int64 float32" in output, output
    code, output = launched(scripts, "numpy_loop.py", "killed", *never, DIE_AT=25)
    assert code == 0 and "ended with ndarray int64 float32" in output, output
    assert scripts.summary("killed")["restarts"] == 1 and scripts.summary("killed")["resumed_from_step"] >= 24
    assert weights(scripts, "killed") == weights(scripts, "calm")


def test_numpy_values_come_back_from_a_file_and_plain_torch_reads_it(scripts: Scripts) -> None:
    assert scripts.alone("numpy_loop.py", "calm", STEPS=40)[0] == 0
    assert scripts.alone("numpy_loop.py", "twice", STEPS=20)[0] == 0
    raw = scripts.folder / "twice/checkpoints/step-000000020/state.pt"
    state = torch.load(raw, weights_only=True)
    assert type(state["objects"]["opt"]["param_groups"][0]["lr"]) is float
    code, output = scripts.alone("numpy_loop.py", "twice", STEPS=40)
    assert code == 0 and "ended with ndarray int64 float32" in output, output
    assert weights(scripts, "twice") == weights(scripts, "calm")
    assert scripts.lines("twice") == scripts.lines("calm")


def test_what_each_rank_has_of_its_own_survives_its_kill(scripts: Scripts) -> None:
    nodes = "--nproc", 1, "--nodes", 2
    assert launched(scripts, "own.py", "calm", *nodes, NAMED=1)[0] == 0
    code, output = launched(scripts, "own.py", "killed", *nodes, NAMED=1, DIE_AT=23)
    assert code == 0, output
    assert scripts.summary("killed")["restarts"] == 1 and scripts.summary("killed")["resumed_from_step"] >= 22
    assert weights(scripts, "killed") == weights(scripts, "calm")
    assert "different on each rank" not in output


def test_with_other_ranks_their_own_state_is_refused_or_redistributed(scripts: Scripts) -> None:
    assert launched(scripts, "own.py", "killed", NAMED=1)[0] == 0
    code, output = launched(scripts, "own.py", "killed", "--nproc", 3, NAMED=1, STEPS=50)
    assert code == 2 and "redistribute" in errors_in(output)[0] and "Traceback" not in output, output
    code, output = launched(scripts, "own.py", "killed", "--nproc", 3, NAMED=1, STEPS=50, redistribute=1)
    assert code == 0 and "redistributed 2 to 0 of 3" in output, output
    code, output = launched(scripts, "own.py", "killed", "--nproc", 3, STEPS=60)
    assert code == 2 and "per_rank" in errors_in(output)[0], output


@pytest.mark.parametrize("die_at", [10, *(pytest.param(step, marks=pytest.mark.soak) for step in (9, 27))])
def test_what_each_rank_has_of_its_own_comes_back_from_a_file(scripts: Scripts, die_at: int) -> None:
    off = "--snapshot-every", "never"
    assert launched(scripts, "own.py", "calm", *off, NAMED=1)[0] == 0
    code, output = launched(scripts, "own.py", "killed", *off, NAMED=1, DIE_AT=die_at)
    assert code == 0 and weights(scripts, "killed") == weights(scripts, "calm"), output


def test_what_differs_without_being_named_is_said_once_and_is_the_reason(scripts: Scripts) -> None:
    code, output = launched(scripts, "own.py", "run")
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if "different on each rank" in line]
    assert all(name in line for name in ("env", "buffer", "noise", "count", "per_rank", "step 10"))
    scripts.write("slow.py", PER_RANK.replace("env.step()", "env.step(); __import__('time').sleep(0.02)"))
    scripts.environment["STEPS"] = "40"
    code, output = scripts.verify("slow.py", "--trials", 2)
    verdict = output.splitlines()[-1]
    assert code == 1 and "env" in verdict and "per_rank" in verdict, output
    assert "neither named" not in verdict


TASK = program_text("kept_state_task")


class Tasks:
    """One process on the task, 10 steps after the last."""

    def __init__(self, scripts: Scripts) -> None:
        self._scripts, self.folder = scripts, scripts.folder
        scripts.write("task.py", TASK)

    def train(self, run: str, steps: int, *flags: object, **more: object) -> tuple[int, str]:
        words = ["-m", "tandem", "train", "--task", "task.py:T", "--batch-size", 24, "--eval-every", "never"]
        own = ["--steps", steps, "--checkpoint-every", 10, *flags]
        return self._scripts.processes.wait(
            self._scripts.start(words[0], run, *words[1:], *own, **more), LIMIT
        )

    def store(self, run: str) -> CheckpointStore:
        return CheckpointStore(self.folder / run / "checkpoints")


@pytest.fixture
def tasks(scripts: Scripts) -> Tasks:
    return Tasks(scripts)


def test_other_groups_and_other_data_are_one_line_and_nothing_is_touched(tasks: Tasks) -> None:
    assert tasks.train("run", 20)[0] == 0
    for more, words in (({"ORDER": "a"}, "groups"), ({"ORDER": "ba"}, "a.weight"), ({"N": 360}, "360")):
        code, output = tasks.train("run", 30, **more)
        assert code == 2 and words in errors_in(output)[0] and "Traceback" not in output, output
    assert tasks.store("run").steps() == [20, 10] and tasks.store("run").quarantined() == []
    code, output = tasks.train("run", 30, "--on-data-change", "continue", N=360)
    assert code == 0 and "360" in output and tasks.store("run").steps() == [30, 20, 10], output


@pytest.mark.soak
def test_what_no_checkpoint_can_hold_is_said_before_step_1_or_at_the_first_save_with_it(tasks: Tasks) -> None:
    code, output = tasks.train("early", 20, EARLY="__import__('decimal').Decimal(1)")
    assert code == 2 and "task['state']['best']" in errors_in(output)[0], output
    assert "Decimal" in errors_in(output)[0] and "Traceback" not in output and "step 1" not in output
    code, output = tasks.train("late", 30, LATE="{1: lambda: 1}")
    assert code == 2 and "['late'][1]" in errors_in(output)[0] and "Traceback" not in output, output
    assert tasks.store("late").steps() == [10]
    code, output = tasks.train("late", 20, LATE="np.float32(3)")
    assert code == 0 and tasks.store("late").steps() == [20, 10], output


def forge(store: CheckpointStore, step: int, value: Any) -> None:
    """Another state under the same manifest, with hashes that are right."""
    info = store.info(step)
    shutil.rmtree(Path(store.path(step)))
    CheckpointStore(store.directory).save(step, lambda sink: torch.save(value, sink), info)  # type: ignore[arg-type]


def test_a_start_goes_back_to_the_newest_that_can_be_loaded(tasks: Tasks) -> None:
    assert tasks.train("calm", 30)[0] == 0
    assert tasks.train("run", 20)[0] == 0
    store = tasks.store("run")
    state = torch.load(Path(store.path(20)) / "state.pt", weights_only=True)
    forge(store, 20, {**state, "odd": Path("a type of which nobody knows")})
    code, output = tasks.train("run", 25, "--checkpoint-every", 15)
    assert code == 0 and "step 20 is intact but cannot be loaded" in output, output
    assert store.steps() == [25, 20, 15, 10] and store.quarantined() == []
    code, output = tasks.train("run", 30)
    assert code == 0 and tasks.store("run").quarantined() == [], output
    state = torch.load(Path(store.path(30)) / "state.pt", weights_only=True)
    calm = torch.load(Path(tasks.store("calm").path(30)) / "state.pt", weights_only=True)
    assert all(torch.equal(state["model"][name], calm["model"][name]) for name in ("a.weight", "b.weight"))
    for step in store.steps():
        forge(store, step, {"model": {"w": torch.zeros(1).expand(1 << 34)}})
    code, output = tasks.train("run", 40)
    assert code == 2 and "can be loaded" in errors_in(output)[-1] and "Traceback" not in output, output
    assert max(store.steps()) == 30 and store.quarantined() == []
