"""A job whose rank computes wrongly under --replay-check: how it ends, and that its advice works."""

import json
import os
import signal
from typing import Any

import pytest
from small_runs import TASK, Runs

from tandem.data.sampler import GlobalOrder

pytestmark = pytest.mark.timeout(300)

BROKEN = (
    TASK.replace(
        "        out = model(x)",
        "        is_faulty = torch.distributed.get_rank() == FAULTY and os.path.exists('broken')\n"
        "        if model.training and is_faulty and (x == 77).any():\n"
        "            os.remove('broken')\n"  # the fault is in this process, not in the rank
        "            self.factor = 1 + 1e-6\n"
        "            if os.path.exists('ends slowly'):\n"
        "                rank_task.end_loaders = lambda: time.sleep(3)\n"
        "        out = model(x) * self.factor",
    )
    .replace("    delay: float = 0.0\n", "    delay: float = 0.0\n    factor = 1.0\n")
    .replace("        rows = TensorRows(", "        x[{row}, 0] = 77\n        rows = TensorRows(")
    .replace("import time\n", "import os\nimport time\n\nfrom tandem.rank import task as rank_task\n\n")
)
FLAGS = ("--steps", 20, "--checkpoint-every", 5, "--replay-check", 5, "--threads", 1)

ENDS_SLOWLY = pytest.mark.parametrize("ends_slowly", [False, pytest.param(True, marks=pytest.mark.slow)])
"""Whether the other nodes wait for the next start before the wrong rank's process has ended."""


def plant(runs: Runs, rank: int) -> None:
    """Write the task, whose `rank` computes wrongly from its 14th step on while there is a file `broken`."""
    row = int(GlobalOrder(2500, 24, seed=0).batch(13)[1][rank])
    (runs.folder / "small.py").write_text(BROKEN.replace("{row}", str(row)).replace("FAULTY", str(rank)))


@pytest.fixture
def undisturbed(runs: Runs) -> str:
    """The weights' SHA-256 of a job without the fault, which the next one has on rank 1."""
    plant(runs, 1)
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
    assert "with --spares or --elastic, the job would leave that node out" in output
    assert found_in(runs, "run") and len(runs.events("run", "world")) == 1, "not retried"
    assert "tandem_replay_checks_total 3.0" in (runs.folder / "run" / "metrics.prom").read_text()
    summary = runs.finish("launch", "run", "--nodes", 3, *FLAGS, "--resume", "run@10")
    assert summary["weights_sha256"] == undisturbed


@ENDS_SLOWLY
def test_a_spare_takes_the_place_of_a_node_that_computes_wrongly(
    runs: Runs, undisturbed: str, ends_slowly: bool
) -> None:
    """And what was saved after the last clean check does not count, in memory or on disk."""
    if ends_slowly:
        (runs.folder / "ends slowly").touch()
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


def nodes_of_starts(runs: Runs, run: str) -> list[int]:
    return [event["nodes"] for event in runs.events(run, "world")]


@ENDS_SLOWLY
def test_an_elastic_job_leaves_the_node_out_and_goes_back_before_the_last_clean_check(
    runs: Runs, ends_slowly: bool
) -> None:
    plant(runs, 1)
    (runs.folder / "broken").touch()
    if ends_slowly:
        (runs.folder / "ends slowly").touch()
    code, output = runs.processes.wait(
        runs.start("launch", "run", "--nodes", 3, "--elastic", "2:3", *FLAGS), limit=180
    )
    assert code == 0, output
    assert found_in(runs, "run") and "node 1 computes wrongly and is left out" in output
    assert nodes_of_starts(runs, "run") == [3, 2]
    (left_out,) = runs.events("run", "node_left_out")
    assert (left_out["node"], left_out["reason"]) == (1, "computes wrongly")
    assert runs.events("run", "resumed")[-1]["step"] == 10
    assert [path.name for path in (runs.folder / "run").glob("checkpoints-before-*/*")]
    log = (runs.folder / "run/log/node-1.log").read_text()
    assert "node 1 stays out of this job" in log and "the job has ended with code 0" in log
    by_hand = runs.finish("launch", "by hand", "--nodes", 2, *FLAGS, "--resume", "run@10")
    assert runs.summary("run")["weights_sha256"] == by_hand["weights_sha256"]


def test_a_node_that_computes_wrongly_does_not_come_back(runs: Runs, free_port: int) -> None:
    """Its platform starts it again on the same machine. It ends with the job."""
    plant(runs, 1)
    (runs.folder / "broken").touch()
    master = ("--nodes", 3, "--elastic", "2:3", "--master", f"127.0.0.101:{free_port}")

    def start(node: int, attempt: int = 1) -> Any:
        flags = ("--node-rank", node, *master, *FLAGS, "--steps", 20_000)
        environment = {**runs.environment, "TANDEM_STATE_DIR": str(runs.folder / f"{node}.{attempt}")}
        command = runs.command("launch", "run", *flags, delay=0.02)
        return runs.processes.start(command, cwd=runs.folder, env=environment)

    def is_out(attempt: int) -> bool:
        path = runs.folder / f"1.{attempt}/health.json"
        return path.exists() and json.loads(path.read_text())["state"] == "spare"

    nodes = [start(node) for node in range(3)]
    runs.until(lambda: nodes_of_starts(runs, "run") == [3, 2] and is_out(1), "start without node 1")
    os.killpg(nodes[1].pid, signal.SIGKILL)
    nodes[1].wait()
    nodes[1] = start(1, attempt=2)
    runs.until(lambda: is_out(2), "node 1 that stays out")
    saved = len(runs.events("run", "checkpoint"))
    runs.until(lambda: len(runs.events("run", "checkpoint")) > saved + 1, "saves without it")
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    ends = [runs.processes.wait(node, limit=120) for node in nodes]
    assert [code for code, _ in ends] == [143, 143, 143], ends
    assert "node 1 stays out of this job" in ends[1][1]
    assert nodes_of_starts(runs, "run") == [3, 2]


def test_a_job_ends_if_its_first_node_computes_wrongly(runs: Runs) -> None:
    plant(runs, 0)
    (runs.folder / "broken").touch()
    code, output = runs.processes.wait(
        runs.start("launch", "run", "--nodes", 3, "--elastic", "1:3", *FLAGS), limit=180
    )
    assert code == 1, output
    assert "wrong: rank 0 on node 0" in output and "resume from a checkpoint of step 10" in output
    assert "the job cannot continue without node 0" in output
    assert nodes_of_starts(runs, "run") == [3]
    assert not list((runs.folder / "run").glob("checkpoints-before-*")), "a person chooses"
