"""A killed and resumed run has the bits of a calm one; at another world size it has the same data.

TANDEM_TRIALS: kills at random steps for each world size (default 3); benchmarks/resume_trials.py has the full
counts, and the task that is used here.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import Runs, rank_processes

from program_files import program_text
from tandem.checkpoint.state import deserialize
from tandem.checkpoint.store import CheckpointStore
from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(500)

TRIALS = int(os.environ.get("TANDEM_TRIALS") or 3)
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "resume_trials.py"


def kills(processes: Any, folder: Path, world_size: int, device: str) -> tuple[dict[str, Any], str]:
    """The benchmark's row for one world size, and what it said of each trial."""
    rows = folder / "rows.json"
    flags = ["--worlds", str(world_size), "--trials", str(TRIALS), "--control", "0", "--device", device]
    code, output = processes.run(
        [sys.executable, str(BENCHMARK), *flags, "--json", str(rows)],
        limit=120 + 60 * TRIALS,
        env={name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")},
    )
    assert code == 0, output
    return dict(json.loads(rows.read_text())["rows"][0]), output


@pytest.mark.parametrize("world_size", [pytest.param(1, marks=pytest.mark.soak), 3])
def test_kills_at_random_steps_change_no_bit(processes: Any, tmp_path: Path, world_size: int) -> None:
    row, output = kills(processes, tmp_path, world_size, "cpu")
    assert row["outcome"] == f"{TRIALS} of {TRIALS} equal", output


@pytest.mark.gpu
def test_on_gpus_with_synchronized_batch_norm(processes: Any, tmp_path: Path, require: Any) -> None:
    require("cuda", torch.cuda.is_available(), "SyncBatchNorm and fused optimizers are not proven here")
    row, output = kills(processes, tmp_path, min(4, torch.cuda.device_count()), "cuda")
    assert row["outcome"] == f"{TRIALS} of {TRIALS} equal", output


# Writes down which samples each process was given, and has nothing that depends on the number of ranks.
TELLTALE = program_text("exact_resume_telltale")
BATCH = 20


def test_another_world_size_keeps_batch_order_and_every_sample(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(TELLTALE)

    def given() -> list[list[list[int]]]:
        """For each process, its samples of each step; the files are taken away."""
        files = sorted(runs.folder.glob("given-*.jsonl"))
        found = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        for file in files:
            file.unlink()
        return found

    def go(run: str, ranks: int, steps: int) -> list[list[list[int]]]:
        flags = ("--task", "small.py:Small", "--batch-size", BATCH, "--schedule", "constant", "--lr", 0.01)
        module = [sys.executable, "-m", "tandem", "launch", *flags, "--run-dir", run, "--nproc", ranks]
        rest = ("--steps", steps, "--metrics", 0, "--metrics-linger", 0, "--threads", 1)
        command = [str(word) for word in (*module, *rest)]
        code, output = runs.processes.run(command, cwd=runs.folder, env=runs.environment)
        assert code == 0, output
        return given()

    order = GlobalOrder(130, BATCH, seed=0)  # 6 steps an epoch: the changes come in the middle of one
    for ranks, first, end in ((2, 0, 8), (3, 8, 15), (1, 15, 20)):  # 20 over 3 ranks: shares of 7, 7 and 6
        per_rank = go("changed", ranks, end)
        assert len(per_rank) == ranks and {len(steps) for steps in per_rank} == {end - first}
        for step in range(first, end):
            samples = [index for steps in per_rank for index in steps[step - first]]
            assert sorted(samples) == sorted(order.batch(step)[1].tolist()), f"step {step}"
    go("calm", 1, 20)
    calm, changed = (
        deserialize(CheckpointStore(runs.folder / run / "checkpoints").read(20)[0])["model"]
        for run in ("calm", "changed")
    )
    for name, value in calm.items():
        torch.testing.assert_close(changed[name], value, rtol=1e-5, atol=1e-6)


def test_a_restart_without_any_state_tests_the_evaluation_again(runs: Runs) -> None:
    """What the test finds is part of the state: without it, the state differed from that of a calm run."""
    flags = ("--nproc", 2, "--threads", 1, "--steps", 40, "--eval-every", "1epoch")
    flags = (*flags, "--snapshot-every", "never", "--checkpoint-every", "never")

    def known(run: str) -> object:
        state = CheckpointStore(runs.folder / run / "checkpoints").read(40)[0]
        return deserialize(state)["exchanges"]

    runs.finish("launch", "calm", *flags)
    process = runs.start("launch", "killed", *flags, delay=0.1)
    runs.until(lambda: bool(runs.events("killed", "training")), "first step")
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)
    code, said = runs.processes.wait(process)
    assert code == 0, said
    assert [event["step"] for event in runs.events("killed", "training")] == [1, 1]
    assert known("killed") == known("calm") != {}
