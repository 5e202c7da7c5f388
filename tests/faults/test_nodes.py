"""Nodes that die: one that comes back, the one that hosts the store, and one that stays away."""

import json
import os
import re
import signal
import time
import urllib.request
from typing import Any

import pytest
from small_runs import Runs

from patience import patient

pytestmark = pytest.mark.timeout(300)

SLOW = 0.02  # seconds per step, so that a fault hits the middle


CLOCK = """
import datetime, sys, time

true, true_time = datetime.datetime, time.time


class Shifted(true):
    @classmethod
    def now(cls, tz=None):
        return true.now(tz) + datetime.timedelta(seconds=SECONDS)


if __name__ == "__main__":
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous
    from tandem.cli import main
    from tandem.launch import rendezvous_state

    dynamic_rendezvous.datetime = rendezvous_state.datetime = Shifted
    time.time = lambda: true_time() + SECONDS
    sys.exit(main())
"""
"""Another wall clock for a node's agent. libfaketime breaks waits (clock_nanosleep); the kernel has none."""


class Cluster:
    """Two nodes started by hand, as a platform does; each is a session of its own."""

    def __init__(
        self, runs: Runs, port: int, run: str, *flags: object, clocks: float = 0.0, nodes: int = 2
    ) -> None:
        """`clocks`: seconds by which node 1's clock is ahead; `nodes`: how many come at once."""
        self.runs, self.run, self.clocks = runs, run, clocks
        master = ("--master", f"127.0.0.101:{port}")
        every = ("--checkpoint-every", 10, "--max-restarts", 0)
        self.flags = ("--nodes", max(2, nodes), *master, *every, *flags)
        self.nodes = [self.start(node) for node in range(nodes)]
        self.said: dict[int, str] = {}  # what each has written, at the end

    def start(self, node: int, *more: object, **given: Any) -> Any:
        command = self.runs.command("launch", self.run, "--node-rank", node, *self.flags, *more, delay=SLOW)
        if node == 1 and self.clocks:
            (self.runs.folder / "shifted.py").write_text(f"SECONDS = {self.clocks}\n{CLOCK}")
            command[1:3] = ["shifted.py"]  # for -m tandem
        return self.runs.processes.start(command, cwd=self.runs.folder, env=self.runs.environment, **given)

    def kill(self, node: int) -> None:
        os.killpg(self.nodes[node].pid, signal.SIGKILL)
        self.nodes[node].wait()

    def finish(self) -> dict[str, Any]:
        for node, process in enumerate(self.nodes):
            code, self.said[node] = self.runs.processes.wait(process)
            assert code == 0, f"node {node} ended with {code}:\n{self.said[node]}"
        return self.runs.summary(self.run)


@pytest.mark.parametrize(
    "node", [pytest.param(1, marks=pytest.mark.soak), 0], ids=["another node", "the store's node"]
)
def test_a_node_comes_back_and_the_survivor_spends_no_budget(runs: Runs, free_port: int, node: int) -> None:
    """Nor does it flood its log, as the keep-alive of a rendezvous did whose store had gone."""
    undisturbed = runs.undisturbed("--steps", 150)
    cluster = Cluster(runs, free_port, "lost", "--steps", 150)
    runs.wait_for_step("lost", 30)
    cluster.kill(node)
    time.sleep(5)  # five signs of life would go into the void
    cluster.nodes[node] = cluster.start(node)
    assert cluster.finish()["weights_sha256"] == undisturbed
    if node == 0:
        before, gone, until_back = cluster.said[1].partition("the store on node 0 is gone")
        assert gone and len(before.splitlines()) < 150, before  # torch's own words at the loss, once
        traces = [
            line for line in until_back.splitlines() if "Traceback" in line or "failed on Socket" in line
        ]
        assert len(traces) < 3 and len(until_back.splitlines()) < 60, until_back


def test_the_loss_of_any_node_costs_one_step_and_reads_no_checkpoint(runs: Runs, free_port: int) -> None:
    """Only the first node kept snapshots, so its loss cost all steps since the last checkpoint."""
    flags = ("--steps", 75, "--threads", 1, "--log-every", 1)
    undisturbed = runs.undisturbed(*flags, ranks=3)
    cluster = Cluster(runs, free_port, "lost", *flags, "--checkpoint-every", 25, nodes=3)
    for node, step in ((0, 15), (1, 30), (2, 45)):
        before, resumed = after_loss(cluster, node, step)
        sources = "memory of node [12]" if node == 0 else "memory of (this node|node [12])"
        assert resumed["step"] >= before - 1 and re.fullmatch(sources, resumed["source"]), (before, resumed)
    assert cluster.finish()["weights_sha256"] == undisturbed


def after_loss(cluster: Cluster, node: int, step: int) -> tuple[int, dict[str, Any]]:
    """Lose a node at `step` or later, and start it again; (the last step before, the event of the resume)."""
    runs, run = cluster.runs, cluster.run
    runs.until(lambda: last_line(runs, run) >= step, f"step {step}")
    known = len(runs.events(run, "resumed"))
    cluster.kill(node)
    time.sleep(0.5)  # the others finish their step, if they can
    before = last_line(runs, run)
    cluster.nodes[node] = cluster.start(node)
    runs.until(lambda: len(runs.events(run, "resumed")) > known, f"resume after the loss of node {node}")
    return before, runs.events(run, "resumed")[-1]


def last_line(runs: Runs, run: str) -> int:
    """The last step in the run's journal."""
    path = runs.folder / run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return max((json.loads(line)["step"] for line in lines), default=0)


def test_an_elastic_run_goes_on_without_a_node_and_with_it_again(runs: Runs, free_port: int) -> None:
    def worlds() -> list[int]:
        return [event["world_size"] for event in runs.events("elastic", "world")]

    def trains_on(nodes: int) -> bool:
        return worlds()[-1:] == [nodes] and len(runs.events("elastic", "training")) >= len(worlds())

    def causes() -> list[str]:
        return [event["cause"] for event in runs.events("elastic", "recovered")]

    cluster = Cluster(runs, free_port, "elastic", "--steps", 600, "--elastic", "1:2")
    runs.until(lambda: trains_on(2), "world of both")
    cluster.kill(1)
    runs.until(lambda: trains_on(1), "world without node 1")
    runs.until(lambda: causes() == ["node 1 was lost"], "the cause of the restart")
    cluster.nodes[1] = cluster.start(1)
    runs.until(lambda: worlds() == [2, 1, 2] and trains_on(2), "world of both again")
    runs.hurry()
    summary = cluster.finish()
    assert worlds() == [2, 1, 2] and causes() == ["node 1 was lost", "a node joined"]
    assert summary["global_step"] == 600
    assert summary["samples_seen"] == 600 * 24


@pytest.mark.soak
def test_an_elastic_run_waits_for_nodes_that_are_seconds_away(runs: Runs, free_port: int) -> None:
    """It opened with one node, and began anew when the other came."""
    flags = ("--elastic", "1:2", "--steps", 20)
    cluster = Cluster(runs, free_port, "settles", *flags, nodes=1)
    log = runs.folder / "settles/log/node-0.log"
    runs.until(lambda: log.is_file() and "1 of 2 nodes have joined" in log.read_text(), "word of node 0")
    cluster.nodes.append(cluster.start(1))
    cluster.finish()
    assert [event["world_size"] for event in runs.events("settles", "world")] == [2]


def test_a_node_that_is_asked_to_stop_leaves_an_elastic_run(runs: Runs, free_port: int) -> None:
    """A graceful scale-down stopped all pods."""
    cluster = Cluster(runs, free_port, "fewer", "--steps", 400, "--elastic", "1:2")
    runs.wait_for_step("fewer", 20)
    cluster.nodes[1].send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(cluster.nodes[1])
    assert code == 143, output
    runs.until(lambda: len(runs.events("fewer", "training")) == 2, "training without node 1")
    cluster.nodes.pop()
    runs.hurry()
    summary = cluster.finish()
    assert [event["world_size"] for event in runs.events("fewer", "world")] == [2, 1]
    saved, began = runs.events("fewer", "stopped"), runs.events("fewer", "training")
    assert began[1]["step"] == saved[0]["step"] + 1, "no step is lost, and none is done again"
    assert summary["global_step"] == 400 and summary["samples_seen"] == 400 * 24


@pytest.mark.soak
def test_all_nodes_of_an_elastic_run_stop_together(runs: Runs, free_port: int) -> None:
    """Its platform asks one after another; those that come later have nothing more to do."""
    cluster = Cluster(runs, free_port, "deleted", "--steps", 5000, "--elastic", "1:2")
    runs.wait_for_step("deleted", 20)
    for node in (1, 0):
        cluster.nodes[node].send_signal(signal.SIGTERM)
        time.sleep(1)
    for node in (0, 1):
        code, output = runs.processes.wait(cluster.nodes[node])
        assert code == 143, output
    saved = max(event["step"] for event in runs.events("deleted", "checkpoint"))
    assert saved == runs.summary("deleted")["global_step"]


def test_clocks_that_differ_change_nothing(runs: Runs, free_port: int) -> None:
    """torch's rendezvous compares the wall clocks of nodes: one 6 s behind was taken for dead, and the rest
    trained without it."""
    undisturbed = runs.undisturbed("--steps", 150)
    cluster = Cluster(runs, free_port, "clocks", "--steps", 150, clocks=-6)
    runs.wait_for_step("clocks", 30)
    cluster.kill(1)
    time.sleep(1)
    cluster.nodes[1] = cluster.start(1)
    summary = cluster.finish()
    assert summary["weights_sha256"] == undisturbed
    assert [event["world_size"] for event in runs.events("clocks", "world")] == [2, 2]
    log = (runs.folder / "clocks/log/node-0.log").read_text()
    assert "the clock of node 1 is 6 s behind node 0's" in log


def test_a_job_that_is_resized_trains_on_and_comes_back_with_the_new_number(
    runs: Runs, free_port: int
) -> None:
    """One node more in the rendezvous, and nobody trained until somebody acted."""
    cluster = Cluster(runs, free_port, "resized", "--steps", 1500)
    runs.wait_for_step("resized", 20)
    said = runs.folder / "newcomer.txt"
    with said.open("w") as file:
        newcomer = cluster.start(2, "--nodes", 3, stdout=file, stderr=file)
    runs.until(lambda: "but node 2 for 3" in said.read_text(), "word of the newcomer", limit=60)
    saved = len(runs.events("resized", "checkpoint"))
    runs.until(lambda: len(runs.events("resized", "checkpoint")) > saved + 1, "save beside the newcomer")
    assert len(runs.events("resized", "world")) == 1
    cluster.kill(0)  # its platform starts it again, with today's number
    cluster.nodes[0] = cluster.start(0, "--nodes", 3)
    code, output = runs.processes.wait(cluster.nodes[1], patient(150))
    assert code == 200 and "started for 3 nodes, but node 1 for 2" in output, output
    cluster.nodes[1:] = [cluster.start(1, "--nodes", 3), newcomer]
    runs.until(lambda: len(runs.events("resized", "world")) == 2, "world of three")
    runs.hurry()
    assert cluster.finish()["nodes"] == 3
    assert [event["world_size"] for event in runs.events("resized", "world")] == [2, 3]


@pytest.mark.soak
def test_node_0_of_a_complete_run_says_what_it_waits_for_and_hears_ctrl_c(runs: Runs, free_port: int) -> None:
    """It stood there in silence for half a minute, deaf to signals."""
    runs.finish("launch", "done", "--nproc", 1, "--steps", 4)
    words = ("--nodes", 2, "--node-rank", 0, "--master", f"127.0.0.101:{free_port}", "--steps", 4)
    process = runs.start("launch", "done", *words)
    said = ""
    while "still telling the other nodes" not in said:
        assert (line := process.stdout.readline()), said
        said += line
    process.send_signal(signal.SIGINT)
    began = time.monotonic()
    code, _ = runs.processes.wait(process, 30)
    assert code == 0 and time.monotonic() - began < patient(10)


def test_while_a_node_is_missing_the_run_is_not_said_to_train(runs: Runs, module_ports: list[int]) -> None:
    """Its time was charged to training, and its health was that of a run that trains."""
    master, metrics = module_ports[:2]
    cluster = Cluster(runs, master, "alone", "--steps", 100_000, "--metrics", f"127.0.0.1:{metrics}")

    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/{path}", timeout=patient(10)) as answer:
            return str(answer.read().decode())

    runs.wait_for_step("alone", 30)
    assert 'tandem_run_state{tandem_run_state="training"} 1.0' in page("metrics")
    cluster.kill(1)
    runs.until(lambda: '="rendezvous"} 1.0' in page("metrics"), "rendezvous")
    assert json.loads(page("healthz"))["health"].startswith("rendezvous")
    cluster.nodes[1] = cluster.start(1)
    runs.until(lambda: '="training"} 1.0' in page("metrics"), "training again")
