"""Hangs end with a name (rank, node, phase); the job goes on and ends as if undisturbed."""

import os
import signal
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from small_runs import Runs, rank_processes

from networks import Machine
from program_files import program_text

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--steps", 200, "--checkpoint-every", 20, "--hang-timeout", 2, "--threads", 1)
SLOW = 0.02  # seconds per step, so that a fault hits the middle

LEAVING = program_text("hangs_leaving")


def named(runs: Runs, run: str) -> dict[str, Any]:
    (event,) = runs.events(run, "hang")
    return event


@pytest.mark.core
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_a_stopped_rank_is_named(runs: Runs, rank: int) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    process = runs.start("launch", "stopped", "--nodes", 2, *FLAGS, delay=SLOW)
    runs.wait_for_step("stopped", 40)
    os.kill(rank_processes(process.pid)[f"tandem-rank-{rank}"], signal.SIGSTOP)
    code, output = runs.processes.wait(process)
    assert code == 0, output
    event = named(runs, "stopped")
    assert (event["rank"], event["node"]) == (rank, rank)
    assert event["step"] >= 20 and event["phase"] in (
        "data",
        "transfer",
        "forward",
        "backward",
        "optimizer",
        "between",
        "checkpoint",
    )
    assert f"rank {rank} on node {rank} hung; training again after" in output
    assert runs.summary("stopped")["weights_sha256"] == undisturbed
    other = runs.folder / "stopped" / "log"
    assert "Thread" in (other / f"stacks-rank-{1 - rank}.txt").read_text()
    if hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json"):  # not in torch 2.6
        assert "all_reduce" in (other / f"flight-rank-{1 - rank}.json").read_text()


@pytest.mark.parametrize("how", [pytest.param("sleep", marks=pytest.mark.soak), "skip"])
def test_a_rank_that_leaves_the_others_waiting_is_named(runs: Runs, how: str) -> None:
    (runs.folder / "leaving.py").write_text(LEAVING)
    flags = (*FLAGS, "--task", "leaving.py:Leaving", "--task.how", how)
    code, output = runs.processes.wait(runs.start("launch", how, "--nodes", 2, *flags, delay=SLOW))
    assert code == 0, output
    event = named(runs, how)
    assert (event["rank"], event["node"]) == (1, 1)
    assert event["phase"] == {"sleep": "forward", "skip": "backward"}[how]
    assert runs.summary(how)["restarts"] == 1


PATIENT = program_text("hangs_patient")


def test_a_slow_first_step_and_a_long_evaluation_are_no_hangs(runs: Runs) -> None:
    (runs.folder / "patient.py").write_text(PATIENT)
    flags = ("--task", "patient.py:Patient", "--steps", 20, "--eval-every", 10, "--hang-timeout", 1)
    summary = runs.finish("launch", "patient", "--nproc", 2, *flags)
    assert summary["restarts"] == 0 and not runs.events("patient", "hang")


def test_a_broken_cable_is_named_and_the_run_goes_on_when_it_is_mended(
    runs: Runs, network: Sequence[Machine]
) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    runs.environment |= {"GLOO_SOCKET_IFNAME": "eth0", "TANDEM_JOB_SECRET": "a secret of this job"}
    place = ("--nodes", 2, "--master", f"{network[0].address}:29500")
    nodes = [
        runs.processes.start(
            [*machine.on, *runs.command("launch", "cable", *place, "--node-rank", index, *FLAGS, delay=SLOW)],
            cwd=runs.folder,
            env=runs.environment,
        )
        for index, machine in enumerate(network[:2])
    ]
    runs.wait_for_step("cable", 40)
    network[0].set_cable("down")
    runs.until(lambda: bool(runs.events("cable", "hang")), "hang")
    network[0].set_cable("up")
    for process in nodes:
        code, output = runs.processes.wait(process)
        assert code == 0, output
    event = named(runs, "cable")
    assert (event["rank"], event["node"]) == (1, 1)
    assert runs.summary("cable")["weights_sha256"] == undisturbed
