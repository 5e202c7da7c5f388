"""A job whose rank computes wrongly under --replay-check: how it ends, and that its advice works."""

from typing import Any

import pytest
from small_runs import TASK, Runs

from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(300)

BROKEN = (
    TASK.replace(
        "        out = model(x)",
        "        is_faulty = torch.distributed.get_rank() == 1 and os.path.exists('broken')\n"
        "        if model.training and is_faulty and (x == 77).any():\n"
        "            os.remove('broken')\n"  # the fault is in this process, not in the rank
        "            self.factor = 1 + 1e-6\n"
        "        out = model(x) * self.factor",
    )
    .replace("    delay: float = 0.0\n", "    delay: float = 0.0\n    factor = 1.0\n")
    .replace("        rows = TensorRows(", "        x[{row}, 0] = 77\n        rows = TensorRows(")
    .replace("import time\n", "import os\nimport time\n")
)
FLAGS = ("--steps", 20, "--checkpoint-every", 5, "--replay-check", 5)


@pytest.fixture
def undisturbed(runs: Runs) -> str:
    """The weights' SHA-256 of a job without the fault, which begins in the 14th step of the next one."""
    row = int(GlobalOrder(2500, 24, seed=0).batch(13)[1][1])  # of rank 1
    (runs.folder / "small.py").write_text(BROKEN.replace("{row}", str(row)))
    found = runs.undisturbed(*FLAGS, ranks=3)
    (runs.folder / "broken").touch()
    return found


def found_in(runs: Runs, run: str) -> dict[str, Any]:
    (found,) = runs.events(run, "replay_mismatch")
    assert found["step"] == 15 and found["clean"] == 10 and [one["rank"] for one in found["ranks"]] == [1]
    return found


def test_a_rank_that_computes_wrongly_ends_the_job_which_resumes_where_the_line_says(
    runs: Runs, undisturbed: str
) -> None:
    """The newest checkpoint may be wrong already, as here that of step 15."""
    code, output = runs.processes.wait(runs.start("launch", "run", "--nodes", 3, *FLAGS), limit=180)
    assert code == 1, output
    assert "step 16 does not count" in output and "wrong: rank 1 on node 1" in output
    assert "resume from a checkpoint of step 10 or before" in output
    assert found_in(runs, "run") and len(runs.events("run", "world")) == 1, "not retried"
    summary = runs.finish("launch", "run", "--nodes", 3, *FLAGS, "--resume", "run@10")
    assert summary["weights_sha256"] == undisturbed


def test_a_spare_takes_the_place_of_a_node_that_computes_wrongly(runs: Runs, undisturbed: str) -> None:
    """And what was saved after the last clean check does not count, in memory or on disk."""
    code, output = runs.processes.wait(
        runs.start("launch", "run", "--nodes", 3, "--spares", 1, *FLAGS), limit=180
    )
    assert code == 0, output
    assert found_in(runs, "run") and "wrong: rank 1 on node 1" in output
    (left_out,) = runs.events("run", "node_left_out")
    assert (left_out["node"], left_out["by"], left_out["reason"]) == (1, 3, "computes wrongly")
    assert runs.summary("run")["weights_sha256"] == undisturbed
    assert [path.name for path in (runs.folder / "run").glob("checkpoints-before-*/*")]


def test_without_a_spare_that_waits_the_job_ends(runs: Runs, undisturbed: str, free_port: int) -> None:
    master = ("--nodes", 3, "--spares", 1, "--master", f"127.0.0.101:{free_port}")
    nodes = [runs.start("launch", "run", "--node-rank", node, *master, *FLAGS) for node in range(3)]
    ends = [runs.processes.wait(node, limit=180) for node in nodes]
    assert [code for code, _ in ends] == [1, 1, 1], ends
    assert "wrong: rank 1 on node 1" in ends[0][1] and "no spare has taken its place" in ends[0][1]
    # What may be wrong is set aside, so the same command resumes before it.
    (runs.folder / "broken").unlink(missing_ok=True)
    assert runs.finish("launch", "run", "--nodes", 3, *FLAGS)["weights_sha256"] == undisturbed
    assert runs.events("run", "resumed")[-1]["step"] == 10
