"""`tandem bench` with real runs: every strategy that can run here, one table, one file."""

import json
import sys

import pytest
from small_runs import Runs

pytestmark = pytest.mark.timeout(300)


def bench(runs: Runs, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tandem", "bench", "--task", "small.py:Small", "--batch-size", "24"]
    command += ["--device", "cpu", "--steps", "25", "--rounds", "1", *words]
    return runs.processes.run(command, limit=250, cwd=runs.folder, env=runs.environment)


def test_it_runs_what_can_run_here_and_says_what_cannot(runs: Runs) -> None:
    code, output = bench(runs, "--compare", "dp,single,ddp", "--output", "found.json")
    assert code == 0, output
    found = json.loads((runs.folder / "found.json").read_text())
    assert (found["steps"], found["rounds"], found["reference"]) == (25, 1, "single")
    dp, single, ddp = found["strategies"]
    assert dp["problem"] == "nn.DataParallel needs two GPUs, but torch sees 0" and dp["problem"] in output
    assert not dp["samples_per_second"] and dp["loss_difference"] is None
    assert (single["ranks"], single["ratio"], single["loss_difference"]) == (1, 1.0, 0.0)
    assert ddp["ranks"] == 2 and ddp["ratio"] > 0 and ddp["loss_difference"] < 0.5
    for mode in (single, ddp):
        assert len(mode["samples_per_second"]) == 1 and mode["samples_per_second"][0] > 0
        assert mode["memory_bytes"][0] > 50 * 2**20 and len(mode["losses"]) == 13
    assert [line.split()[0] for line in output.splitlines()[-4:]] == ["strategy", "dp", "single", "ddp"]


@pytest.mark.soak
def test_a_run_that_fails_is_a_row_with_its_last_words(runs: Runs) -> None:
    code, output = bench(runs, "--compare", "single", "--batch-shares", "3:1")
    assert code == 1 and "failed: --batch-shares 3:1 is for 2 ranks, but there are 1" in output, output
