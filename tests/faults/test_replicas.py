"""A task that changes the weights of one rank, and what the comparison of replicas says of it."""

import pytest
from small_runs import TASK, Runs

from tandem.checkpoint.store import CheckpointStore
from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(300)

CORRUPT = TASK.replace(
    "        out = model(x)",
    "        if model.training and (x == 77).any():\n"
    "            with torch.no_grad():\n"
    "                model[4].weight[3, 5] += 1e-6\n"
    "        out = model(x)",
).replace("        rows = TensorRows(", "        x[{row}, 0] = 77\n        rows = TensorRows(")


def test_the_rank_with_other_weights_is_named(runs: Runs) -> None:
    rank = 0  # the hardest: the others differ from rank 0, but they are the majority
    row = int(GlobalOrder(2500, 24, seed=0).batch(13)[1][rank])  # in the 14th step
    (runs.folder / "small.py").write_text(CORRUPT.replace("{row}", str(row)))
    flags = ("--nodes", 3, "--steps", 40, "--replica-check-every", 10, "--checkpoint-every", 10)
    code, output = runs.processes.wait(runs.start("launch", "run", *flags), limit=180)
    assert code == 1, output
    assert f"after step 20: rank {rank} on node {rank} (127.0.0.10{rank + 1}) differs, first in" in output
    found = runs.events("run", "replica_mismatch")
    assert [(event["step"], [one["rank"] for one in event["ranks"]]) for event in found] == [(20, [rank])]
    assert "tandem_replica_mismatches_total 1.0" in (runs.folder / "run" / "metrics.prom").read_text()
    assert CheckpointStore(runs.folder / "run" / "checkpoints").steps()[0] == 10, "no save after a mismatch"
    assert len(runs.events("run", "world")) == 1, "not retried"
