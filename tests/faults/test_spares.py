"""Jobs with spares: a waiting node takes the place of a lost one."""

import json
import os
import signal
import sys
import time
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from patience import patient
from tree import of_launch

pytestmark = pytest.mark.timeout(300)

SLOW = 0.02  # seconds per step, so that a fault hits the middle
FLAGS = ("--steps", 300, "--threads", 1, "--log-every", 1, "--checkpoint-every", 1000)


class Job:
    """Two nodes and a spare, started by hand as a platform does; each is a session of its own."""

    def __init__(self, runs: Runs, port: int, run: str, *flags: object) -> None:
        self.runs, self.run = runs, run
        master = ("--master", f"127.0.0.101:{port}")
        self.flags = ("--nodes", 2, "--spares", 1, *master, *FLAGS, *flags)
        self.nodes = [self.start(node) for node in range(3)]

    def start(self, node: int) -> Any:
        runs = self.runs
        command = runs.command("launch", self.run, "--node-rank", node, *self.flags, delay=SLOW)
        environment = {**runs.environment, "TANDEM_STATE_DIR": str(runs.folder / f"state-{node}")}
        return runs.processes.start(command, cwd=runs.folder, env=environment)

    def state(self, node: int) -> str:
        path = self.runs.folder / f"state-{node}" / "health.json"
        return str(json.loads(path.read_text())["state"]) if path.exists() else ""

    def kill(self, node: int) -> None:
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()

    def waits(self, node: int) -> None:
        self.runs.until(lambda: self.state(node) == "spare", f"waiting node {node}")

    def steps(self, more: int) -> None:
        """Until so many more steps are in the journal."""
        before = self.step()
        self.runs.until(lambda: self.step() >= before + more, f"{more} steps after {before}")

    def step(self) -> int:
        path = self.runs.folder / self.run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines), default=0)

    def events(self, kind: str, count: int) -> list[dict[str, Any]]:
        self.runs.until(lambda: len(self.runs.events(self.run, kind)) >= count, f"event {kind}")
        return self.runs.events(self.run, kind)

    def recovers(self, times: int) -> None:
        kinds = ("rank_killed", "recovered")
        self.runs.until(
            lambda: sum(len(self.runs.events(self.run, kind)) for kind in kinds) >= times, f"recovery {times}"
        )

    def finish(self, code: int = 0) -> dict[str, Any]:
        for node, process in enumerate(self.nodes):
            found, said = self.runs.processes.wait(process)
            assert found == code, f"node {node} ended with {found}:\n{said}"
        return self.runs.summary(self.run)


def test_a_spare_takes_the_place_of_a_lost_node_which_comes_back_as_a_spare(
    runs: Runs, free_port: int
) -> None:
    """Node 0, which no spare can replace, comes back to the places that were."""
    flags = (*FLAGS, "--steps", 1000)
    undisturbed = runs.undisturbed(*flags)
    job = Job(runs, free_port, "lost", "--steps", 1000)
    job.waits(2)
    for lost, by in ((1, 2), (2, 1), (0, None)):
        known = len(runs.events("lost", "resumed"))
        replaced = len(runs.events("lost", "node_replaced"))
        job.steps(20)
        before = job.step()
        job.kill(lost)
        if by is None:
            job.nodes[lost] = job.start(lost)
        resumed = job.events("resumed", known + 1)[-1]
        assert resumed["step"] >= before - 1 and "memory" in resumed["source"], (before, resumed)
        new = [(each["node"], each["by"]) for each in runs.events("lost", "node_replaced")[replaced:]]
        assert new == ([] if by is None else [(lost, by)])
        if by is not None:
            assert job.events("recovered", known + 1)[-1]["steps_lost"] <= 1
            job.nodes[lost] = job.start(lost)
            job.waits(lost)
    job.waits(2)
    assert len(runs.events("lost", "checkpoint")) == 0, "nothing was saved yet, so nothing could be read"
    runs.hurry()
    summary = job.finish()
    assert summary["weights_sha256"] == undisturbed
    assert summary["nodes"] == 2 and summary["world_size"] == 2


def test_a_node_that_fails_three_times_is_left_out(runs: Runs, free_port: int) -> None:
    undisturbed = runs.undisturbed(*FLAGS, "--steps", 600)
    job = Job(runs, free_port, "left-out", "--steps", 600)
    job.waits(2)
    for failures in (1, 2, 3):
        job.steps(10)
        os.kill(rank_processes(job.nodes[1].pid)["tandem-rank-1"], signal.SIGKILL)
        # On a busy machine, another rank's lost connection may be seen first.
        job.recovers(failures)
    (left_out,) = job.events("node_left_out", 1)
    assert (left_out["node"], left_out["by"]) == (1, 2)
    job.waits(1)
    runs.until(lambda: job.state(2) != "spare", "node 2 in its place")
    job.steps(5)
    command = [sys.executable, "-m", "tandem", "stacks", "left-out"]
    said = ""

    def shows_rank_1() -> bool:
        nonlocal said
        code, said = runs.processes.run(command, cwd=runs.folder, env=runs.environment)
        assert code == 0, said
        return "rank 1" in said

    # Node 0 knows a rank from its first heartbeat on, which may come some steps after its start.
    runs.until(shows_rank_1, "stack of rank 1")
    assert "did not answer" not in said, said
    runs.hurry()
    assert job.finish()["weights_sha256"] == undisturbed


def test_a_stop_of_the_job_ends_the_spare_too_and_a_stop_of_the_spare_ends_nothing_else(
    runs: Runs, free_port: int
) -> None:
    job = Job(runs, free_port, "stopped", "--shutdown-timeout", 4)
    job.waits(2)
    job.steps(5)
    job.nodes[2].send_signal(signal.SIGTERM)
    code, said = runs.processes.wait(job.nodes[2])
    assert code == 143 and "the job continues" in said, said
    job.steps(5)
    job.nodes[2] = job.start(2)
    time.sleep(patient(1))
    job.waits(2)
    for process in job.nodes:
        process.send_signal(signal.SIGTERM)
    assert job.finish(143)["state"] == "stopped"
    assert not runs.events("stopped", "node_replaced")


@pytest.mark.core
def test_simulated_nodes_have_a_spare(runs: Runs) -> None:
    """One launch starts all, and a killed node comes back as the spare."""
    undisturbed = runs.undisturbed(*FLAGS)
    process = runs.start("launch", "simulated", "--nodes", 2, "--spares", 1, *FLAGS, delay=SLOW)
    log = runs.folder / "simulated/log/node-2.log"
    runs.until(lambda: log.exists() and "waits as a spare" in log.read_text(), "spare")
    runs.until(lambda: bool(runs.events("simulated", "training")), "training")
    (node,) = [pid for pid, name in of_launch(process.pid).items() if name == "tandem-node-1"]
    os.kill(node, signal.SIGKILL)
    code, said = runs.processes.wait(process)
    assert code == 0, said
    (replaced,) = runs.events("simulated", "node_replaced")
    assert (replaced["node"], replaced["by"]) == (1, 2)
    assert runs.summary("simulated")["weights_sha256"] == undisturbed
