"""A job whose rank computes wrongly under --replay-check: how it ends, and that its advice works."""

import pytest
from small_runs import TASK, Runs

from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(300)

BROKEN = (
    TASK.replace(
        "        out = model(x)",
        "        self.is_broken |= bool(model.training and os.path.exists('broken') and (x == 77).any())\n"
        "        out = model(x)\n"
        "        if self.is_broken and torch.distributed.get_rank() == 1:\n"
        "            out = out * (1 + 1e-6)",
    )
    .replace("    delay: float = 0.0\n", "    delay: float = 0.0\n    is_broken = False\n")
    .replace("        rows = TensorRows(", "        x[{row}, 0] = 77\n        rows = TensorRows(")
    .replace("import time\n", "import os\nimport time\n")
)


def test_a_rank_that_computes_wrongly_ends_the_job_which_resumes_where_the_line_says(runs: Runs) -> None:
    """A spare does not take over: the newest checkpoint may be wrong already, as here that of step 15."""
    row = int(GlobalOrder(2500, 24, seed=0).batch(13)[1][1])  # of rank 1, in the 14th step
    (runs.folder / "small.py").write_text(BROKEN.replace("{row}", str(row)))
    flags = ("--steps", 20, "--checkpoint-every", 5, "--replay-check", 5)
    undisturbed = runs.undisturbed(*flags, ranks=3)
    (runs.folder / "broken").touch()
    code, output = runs.processes.wait(
        runs.start("launch", "run", "--nodes", 3, "--spares", 1, *flags), limit=180
    )
    assert code == 1, output
    assert "step 16 does not count" in output and "wrong: rank 1 on node 1" in output
    assert "resume from a checkpoint of step 10 or before" in output
    (found,) = runs.events("run", "replay_mismatch")
    assert found["step"] == 15 and found["clean"] == 10 and [one["rank"] for one in found["ranks"]] == [1]
    assert len(runs.events("run", "world")) == 1 and not runs.events("run", "node_left_out"), "not retried"
    (runs.folder / "broken").unlink()  # that machine is left out
    summary = runs.finish("launch", "run", "--nodes", 3, *flags, "--resume", "run@10")
    assert summary["weights_sha256"] == undisturbed
