"""One rank of two sees numbers that are not finite: what all ranks do, and what is left of it."""

from typing import Any

import pytest
import torch
from small_runs import TASK, Runs

from tandem.checkpoint.state import deserialize
from tandem.checkpoint.store import CheckpointStore
from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(200)

LOSS_STEP, GRADIENT_STEP = 12, 17  # finished steps once they are done
# A row with NaN spoils the loss of the rank that gets it (and its BatchNorm's statistics); a row of 99 adds
# a term of value 0 whose gradient is NaN.
SPOIL = """\
        x[{loss_row}] = float("nan")
        x[{gradient_row}] = 99
"""
SPOILED_LOSS = """\
        loss = nn.functional.cross_entropy(out, y)
        if model.training and (x > 90).any():
            loss = loss + (model[4].weight - model[4].weight.detach()).abs().sqrt().sum()
        return loss,"""
SPOILED = TASK.replace("        rows =", SPOIL + "        rows =").replace(
    "        return nn.functional.cross_entropy(out, y),", SPOILED_LOSS
)


@pytest.fixture
def spoiled(runs: Runs) -> Runs:
    """The bad rows are in rank 1's share: odd places of the global batch."""
    order = GlobalOrder(2500, 24, seed=0)
    rows = [int(order.batch(step - 1)[1][3]) for step in (LOSS_STEP, GRADIENT_STEP)]
    (runs.folder / "small.py").write_text(
        SPOILED.replace("{loss_row}", str(rows[0])).replace("{gradient_row}", str(rows[1]))
    )
    return runs


def state(runs: Runs, run: str, step: int) -> dict[str, Any]:
    return deserialize(CheckpointStore(runs.folder / run / "checkpoints").read(step)[0])


def flat(value: Any, name: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {path: v for key, inner in value.items() for path, v in flat(inner, f"{name}/{key}").items()}
    return {name: value}


def launch(runs: Runs, *flags: object) -> tuple[int, str]:
    every = ("--nproc", 2, "--steps", 20, "--checkpoint-every", 1, "--checkpoint-keep", 50)
    code, output = runs.processes.wait(runs.start("launch", "run", *every, *flags))
    return int(code), str(output)


@pytest.mark.core
def test_skip_leaves_no_trace_of_the_step(spoiled: Runs) -> None:
    code, output = launch(spoiled, "--on-nonfinite", "skip", "--optimizer", "adamw")
    assert code == 0, output
    for step in (LOSS_STEP, GRADIENT_STEP):
        before, after = (flat(state(spoiled, "run", at)) for at in (step - 1, step))
        assert before.keys() == after.keys()
        for name, value in before.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, after[name]) and value.isfinite().all(), name
    last, end = flat(state(spoiled, "run", GRADIENT_STEP)), flat(state(spoiled, "run", 20))
    assert not torch.equal(last["/model/0.weight"], end["/model/0.weight"]), "training went on"
    page = (spoiled.folder / "run" / "metrics.prom").read_text()
    assert 'tandem_steps_skipped_total{reason="nonfinite_loss"} 1.0' in page
    assert 'tandem_steps_skipped_total{reason="nonfinite_grad"} 1.0' in page
    events = [(event["step"], event["reason"]) for event in spoiled.events("run", "nonfinite")]
    assert events == [(LOSS_STEP, "nonfinite_loss"), (GRADIENT_STEP, "nonfinite_grad")]


@pytest.mark.soak
def test_stop_keeps_the_last_good_checkpoint(spoiled: Runs) -> None:
    code, output = launch(spoiled)
    assert code == 1, output
    assert f"the loss of step {LOSS_STEP} is not finite" in output and "Traceback" not in output
    store = CheckpointStore(spoiled.folder / "run" / "checkpoints")
    assert store.steps()[0] == LOSS_STEP - 1
    good = flat(state(spoiled, "run", LOSS_STEP - 1))
    assert all(v.isfinite().all() for v in good.values() if isinstance(v, torch.Tensor))
    assert spoiled.summary("run")["exit_code"] == 1
    assert len(spoiled.events("run", "world")) == 1, "not retried"


@pytest.mark.soak
def test_a_stop_names_the_first_tensor_and_its_rank(spoiled: Runs) -> None:
    code, output = launch(spoiled)
    assert code == 1, output
    assert f"the loss of step {LOSS_STEP} is not finite (first: the batch[0] on rank 1)" in output
    source = (spoiled.folder / "small.py").read_text()
    (spoiled.folder / "small.py").write_text(source.replace('float("nan")', "0.0"))
    code, output = launch(spoiled)
    assert code == 1, output
    assert f"step {GRADIENT_STEP} are not finite (first: the gradient of 4.weight)" in output
