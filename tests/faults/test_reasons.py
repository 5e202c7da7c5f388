"""What ended a job is the last line of every node, and the first node is the first to leave."""

import os
import signal
from typing import Any

import pytest
from small_runs import Runs, rank_processes
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from program_files import program_text

pytestmark = pytest.mark.timeout(600)
LIMIT = 250.0  # two nodes import torch in half a minute, on a busy machine in two

LATE = program_text("reasons_late")
BUG = program_text("reasons_bug")
SAID = "rank 1 on node 1: KeyError: 'no such column'"


def test_a_bug_on_one_node_is_the_last_line_of_all(runs: Runs) -> None:
    (runs.folder / "buggy.py").write_text(BUG)
    flags = ("--task", "buggy.py:Buggy", "--nodes", 2, "--steps", 50)
    code, output = runs.processes.wait(runs.start("launch", "bug", *flags), LIMIT)
    assert code == 1, output
    last = output.splitlines()[-1]
    assert "ended with code 1: another node ended the job with code 1" in last and SAID in last, output
    there = (runs.folder / "bug" / "log" / "node-1.log").read_text().splitlines()
    assert "ended with code 1" in there[-1] and SAID in there[-1], there
    assert not any("recvValue" in line for line in there), "no stack trace of torch's store"
    reason = runs.summary("bug")["reason"]
    assert SAID in reason and reason.endswith("(buggy.py line 8)"), reason
    assert runs.summary("bug")["exit_code"] == 1


@pytest.mark.soak
def test_a_rank_that_takes_long_to_leave_is_waited_for(runs: Runs) -> None:
    """Its node lost the store of node 0, which left after 10 s, and waited for a new one in vain."""
    (runs.folder / "late.py").write_text(LATE)
    flags = ("--task", "late.py:Late", "--nodes", 2, "--steps", 5)
    code, output = runs.processes.wait(runs.start("launch", "late", *flags), LIMIT)
    assert code == 0, output
    log = (runs.folder / "late" / "log" / "node-1.log").read_text()
    assert "rejoining the rendezvous" not in log, log


@pytest.mark.soak
def test_a_mistake_in_one_nodes_settings_ends_the_others(runs: Runs, free_port: int) -> None:
    """It is found before the node knows its place, and node 0 waited for --master-timeout."""
    own = ("--nodes", 2, "--master", f"127.0.0.1:{free_port}", "--steps", 5, "--node-rank")
    flags = ((0,), (1, "--epoks", "3"))
    nodes = [runs.start("launch", "mistaken", *own, *more) for more in flags]
    ended = [runs.processes.wait(node, LIMIT) for node in nodes]
    assert [code for code, _ in ended] == [2, 2], ended
    assert "--epoks" in ended[1][1].splitlines()[0], ended
    said = ended[0][1].splitlines()[-1]
    assert "node 1" in said and "--epoks" in said, ended


def test_a_mistake_in_node_zeros_settings_ends_the_other(runs: Runs, free_port: int) -> None:
    own = ("--nodes", 2, "--master", f"127.0.0.1:{free_port}", "--steps", 5)
    nodes = [
        runs.start("launch", "mistaken", *own, "--node-rank", index, *(() if index else ("--epochs", "x")))
        for index in (0, 1)
    ]
    ended = [runs.processes.wait(node, LIMIT) for node in nodes]
    assert [code for code, _ in ended] == [2, 2], ended
    assert "another node ended the job with code 2: --epochs: invalid value 'x'" in ended[1][1], ended


def test_a_poisoned_verdict_of_0_does_not_end_a_job_that_is_not_done(runs: Runs, free_port: int) -> None:
    """As somebody on the network could: a verdict in the store, and a rank that dies."""
    undisturbed = runs.undisturbed("--steps", 200)
    own = ("--nodes", 2, "--master", f"127.0.0.1:{free_port}", "--steps", 200, "--checkpoint-every", 20)
    nodes = [runs.start("launch", "poisoned", *own, "--node-rank", index, delay=0.02) for index in range(2)]
    runs.wait_for_step("poisoned", 40)
    TCPStore("127.0.0.1", free_port, is_master=False).set("tandem/verdict", "0")
    (pid,) = rank_processes(nodes[1].pid).values()
    os.kill(pid, signal.SIGKILL)
    ended = [runs.processes.wait(node, LIMIT) for node in nodes]
    assert [code for code, _ in ended] == [0, 0], ended
    assert "the job has finished, but it has not" in ended[0][1] + ended[1][1]
    summary = runs.summary("poisoned")
    assert summary["global_step"] == 200 and summary["weights_sha256"] == undisturbed
    assert (runs.folder / "poisoned" / "checkpoints" / "step-000000200").is_dir()


@pytest.mark.parametrize("layout", [("--nproc", 1), ("--nodes", 2)], ids=["one", "two"])
def test_a_refused_launch_leaves_the_record_of_the_last_one(runs: Runs, layout: tuple[Any, ...]) -> None:
    """A finished run was called failed at step 0 because its next launch had another batch size."""
    before = runs.finish("launch", "run", *layout, "--steps", 20, "--batch-size", 24)
    code, said = runs.processes.wait(
        runs.start("launch", "run", *layout, "--steps", 40, "--batch-size", 48)
    )
    assert code == 2 and "batch_size" in said, said
    assert runs.summary("run") == before
