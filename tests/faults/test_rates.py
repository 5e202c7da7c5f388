"""The learning rates of a run are those of its global batch and steps, on however many ranks it goes on."""

import json

import pytest
from small_runs import Runs

pytestmark = [pytest.mark.soak, pytest.mark.timeout(300)]

FLAGS = (
    "--device", "cpu", "--threads", 1, "--log-every", 5, "--checkpoint-every", 10, "--eval-every", "never",
    "--lr-scaling", "linear:12", "--warmup", 8,
)  # fmt: skip

DELAY = 0.15  # seconds per step: time to be stopped in the middle; a resume asks for the same


def test_an_elastic_resume_keeps_the_rate_curve(runs: Runs) -> None:
    said = ""
    for ranks, last in ((2, 20), (1, 40)):  # the rest of the plan is the same: the schedule knows 40 steps
        flags = (*FLAGS, "--nproc", ranks, "--steps", 40)
        if last == 40:
            code, output = runs.processes.wait(runs.start("launch", "run", *flags, delay=DELAY))
            assert code == 0, output
        else:
            started = runs.start("launch", "run", *flags, delay=DELAY)
            runs.wait_for_step("run", last)
            started.terminate()
            code, output = runs.processes.wait(started)
            assert code == 143, output
        said += output
    assert said.count("lr 0.1 x 24/12 (linear) = 0.2, warm-up linear over 8 steps") == 2, (
        said
    )
    assert runs.summary("run")["world_size"] == 1 and runs.summary("run")["resumed_from_step"] >= 20
    runs.finish("launch", "calm", *FLAGS, "--nproc", 1, "--steps", 40)
    rates = [
        {
            line["step"]: line["learning_rate"]
            for line in map(json.loads, (runs.folder / run / "metrics.jsonl").open())
        }
        for run in ("run", "calm")
    ]
    assert rates[0] == rates[1] and len(rates[0]) == 8
