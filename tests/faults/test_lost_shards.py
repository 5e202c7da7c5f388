"""Under fsdp, the next node keeps a copy of each node's shards, so the loss of a node needs no checkpoint."""

import pytest
from small_runs import Runs
from test_nodes import Cluster, after_loss
from test_spares import Job

from needs import require_strategy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _has_fsdp() -> None:
    require_strategy("fsdp")


FLAGS = ("--strategy", "fsdp", "--device", "cpu", "--threads", 1, "--log-every", 1)


def test_the_loss_of_any_node_costs_one_interval_and_reads_no_checkpoint(runs: Runs, free_port: int) -> None:
    flags = (*FLAGS, "--steps", 75)
    undisturbed = runs.undisturbed(*flags, ranks=3)
    cluster = Cluster(runs, free_port, "lost", *flags, "--checkpoint-every", 25, nodes=3)
    for node, step in ((0, 15), (1, 30), (2, 45)):
        before, resumed = after_loss(cluster, node, step)
        # A step whose copies were still under way is repeated, too.
        assert resumed["step"] >= before - 2, (before, resumed)
        assert resumed["source"] == f"memory of node {(node + 1) % 3}"
    assert cluster.finish()["weights_sha256"] == undisturbed


def test_the_loss_of_a_node_and_the_next_one_needs_the_checkpoint(runs: Runs, free_port: int) -> None:
    flags = (*FLAGS, "--steps", 75)
    undisturbed = runs.undisturbed(*flags, ranks=3)
    cluster = Cluster(runs, free_port, "lost", *flags, "--checkpoint-every", 25, nodes=3)
    runs.wait_for_step("lost", 25)
    known = len(runs.events("lost", "resumed"))
    for node in (1, 2):
        cluster.kill(node)
    for node in (1, 2):
        cluster.nodes[node] = cluster.start(node)
    runs.until(lambda: len(runs.events("lost", "resumed")) > known, "resume after the loss of two nodes")
    resumed = runs.events("lost", "resumed")[-1]
    assert (resumed["source"], resumed["step"] % 25) == ("checkpoint", 0)
    assert cluster.finish()["weights_sha256"] == undisturbed


def test_a_spare_receives_the_shards_of_the_node_that_it_replaces(runs: Runs, free_port: int) -> None:
    flags = ("--strategy", "fsdp", "--device", "cpu", "--steps", 150)
    job = Job(runs, free_port, "replaced", *flags)
    job.waits(2)
    job.steps(20)
    before = job.step()
    known = len(runs.events("replaced", "resumed"))
    job.kill(1)
    resumed = job.events("resumed", known + 1)[-1]
    assert resumed["step"] >= before - 2 and resumed["source"] == "memory of node 0", (before, resumed)
    job.nodes.pop(1)
    assert job.finish()["global_step"] == 150
    assert not runs.events("replaced", "checkpoint")[:-1], "none was saved before the last step"
