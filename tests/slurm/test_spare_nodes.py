"""A job with a spare on a real Slurm of three nodes: it trains on when a node is lost, without a requeue."""

import json
from typing import Any

import pytest
from slurm_jobs import TRAIN, Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.multi, pytest.mark.slow, pytest.mark.timeout(600)]
NODES = 3


def test_a_spare_takes_the_place_of_a_lost_node(slurm: Slurm, undisturbed: dict[str, Any]) -> None:
    (slurm.folder / "hold").touch()
    sbatch = ("sbatch", "--parsable", "--nodes=3", "--no-kill", "--output=spare.out", str(TRAIN))
    code, job = slurm.run(*sbatch, *slurm.task(), "--spares", "1", TANDEM_RUN_DIR="spare")
    assert code == 0, job
    job = job.strip()
    slurm.until(lambda: slurm.step("spare") >= 5, "it trains")
    slurm.until(lambda: "waits as a spare" in slurm.said(), "the spare waits")
    slurm.cluster.lose("node2")
    events = slurm.folder / "spare" / "events.jsonl"
    slurm.until(lambda: "node_replaced" in events.read_text(), "the spare has the place of the lost node")
    (slurm.folder / "hold").unlink()
    slurm.until(lambda: slurm.cluster.job(job)["JobState"] not in ("RUNNING", "COMPLETING"), "it ended")
    ended = slurm.cluster.job(job)
    assert (ended["JobState"], ended["Restarts"]) == ("COMPLETED", "0"), slurm.said()
    assert slurm.summary("spare")["weights_sha256"] == undisturbed["weights_sha256"]
    (replaced,) = [each for each in map(json.loads, events.read_text().splitlines())
                   if each["kind"] == "node_replaced"]  # fmt: skip
    assert (replaced["node"], replaced["by"]) == (1, 2)
