"""Runs that are killed, stopped and started again, each with its outcome: real processes over gloo."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs, rank_processes

from program_files import program_text
from tree import of_launch

pytestmark = pytest.mark.timeout(300)

EVERY = ("--checkpoint-every", "20", "--steps", "200")
SLOW = 0.02  # seconds per step, so that a fault hits the middle


def test_every_launcher_ends_with_the_same_weights(runs: Runs) -> None:
    launched = runs.finish("launch", "launched", "--nodes", 2, "--steps", 60)
    other = runs.finish("torchrun", "other", "--steps", 60, "--threads", 1)
    again = runs.finish("launch", "again", "--nodes", 2, "--steps", 60, "--threads", 1)
    assert other["weights_sha256"] == again["weights_sha256"]
    assert launched["world_size"] == other["world_size"] == 2
    if len(os.sched_getaffinity(0)) == 2:
        assert launched["weights_sha256"] == other["weights_sha256"]


@pytest.mark.core
def test_a_killed_rank_costs_one_restart_and_no_bit(runs: Runs) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    process = runs.start("launch", "killed", "--nodes", 2, *EVERY, delay=SLOW)
    runs.wait_for_step("killed", 40)
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)
    code, output = runs.processes.wait(process)
    assert code == 0, output
    summary = runs.summary("killed")
    assert summary["restarts"] == 1
    assert summary["resumed_from_step"] >= 40
    assert summary["weights_sha256"] == undisturbed
    assert "Traceback" not in output


@pytest.mark.core
@pytest.mark.parametrize("target", ["launcher", pytest.param("every process", marks=pytest.mark.soak)])
def test_a_stop_signal_saves_once_and_the_next_start_goes_on(runs: Runs, target: str) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    process = runs.start("launch", "stopped", "--nodes", 2, *EVERY, delay=SLOW)
    runs.wait_for_step("stopped", 20)
    if target == "launcher":
        process.terminate()
    else:
        for pid in of_launch(process.pid):
            os.kill(pid, signal.SIGTERM)
    code, output = runs.processes.wait(process)
    assert code == 143, output
    asked = "SIGTERM: asking all ranks to save and stop (up to 25 s)"
    assert output.count(asked) == 1, output
    stopped = runs.summary("stopped")
    assert stopped["state"] == "stopped" and stopped["exit_code"] == 143
    assert stopped["last_checkpoint_step"] == stopped["global_step"] < 200
    steps = [event["step"] for event in runs.events("stopped", "checkpoint")]
    assert steps == sorted(set(steps)), "each step is saved once"
    resumed = runs.finish("launch", "stopped", "--nodes", 2, *EVERY, delay=SLOW)
    assert resumed["resumed_from_step"] == stopped["global_step"]
    assert resumed["weights_sha256"] == undisturbed


@pytest.mark.soak
def test_a_stop_before_training_says_that_nothing_was_saved(runs: Runs, free_port: int) -> None:
    flags = ("--nodes", 2, "--node-rank", 0, "--master", f"127.0.0.1:{free_port}")
    process = runs.start("launch", "early", *flags)
    log = runs.folder / "early" / "log" / "node-0.log"
    runs.until(lambda: log.exists() and "waiting" in log.read_text(), "word about waiting")
    process.terminate()
    code, output = runs.processes.wait(process)
    assert code == 137, output
    assert output.count("SIGTERM came before training started; nothing to save") == 1, output


SLOW_START = program_text("runs_slow_start")


@pytest.mark.parametrize("there", ["nothing", pytest.param("a checkpoint", marks=pytest.mark.soak)])
def test_a_stop_before_the_first_step_ends_the_ranks(runs: Runs, there: str) -> None:
    """They hear a stop at a step: they were killed after --shutdown-timeout, which is no matter here."""
    (runs.folder / "log.py").write_text(SLOW_START)
    flags = ("--nodes", 2, "--task", "log.py:SlowStart", "--shutdown-timeout", 500)
    if there == "a checkpoint":
        runs.finish("launch", "early", *flags, "--steps", 20)
    (runs.folder / "slow").touch()
    process = runs.start("launch", "early", *flags, "--steps", 40)
    logs = [runs.folder / "early" / "log" / f"rank-{rank}.log" for rank in range(2)]
    said: list[str] = []
    while not any("making data" in line for line in said):
        said.append(process.stdout.readline())
        assert said[-1], said
    runs.until(lambda: "making data" in logs[1].read_text(), "rank 1 that makes data")
    process.terminate()
    code, output = runs.processes.wait(process)
    assert "Traceback" not in output and "lost the other ranks" not in output, output
    stopped = runs.summary("early")
    if there == "nothing":
        assert code == 137, output
        assert output.count("SIGTERM came before training started; nothing to save") == 1, output
        assert stopped["exit_code"] == 137
    else:
        assert code == 143, output
        line = "SIGTERM came before the first step; nothing to save; run the same command again to resume "
        line += "from step 2"
        assert output.count(line) == 1, output
        assert stopped["global_step"] == stopped["last_checkpoint_step"] == 20
        (runs.folder / "slow").unlink()
        assert runs.finish("launch", "early", *flags, "--steps", 40)["resumed_from_step"] == 20
    assert not rank_processes(process.pid)


STUCK = program_text("runs_stuck")


@pytest.mark.parametrize("rank", ["stuck", pytest.param("stopped", marks=pytest.mark.soak)])
def test_nothing_outlives_a_killed_agent(runs: Runs, rank: str) -> None:
    (runs.folder / "stuck.py").write_text(STUCK)
    task = ["--task", "stuck.py:Stuck"] if rank == "stuck" else []
    process = runs.start("launch", "orphans", *EVERY, *task, delay=SLOW)
    runs.wait_for_step("orphans", 20)
    (pid,) = rank_processes(process.pid).values()
    if rank == "stopped":
        os.kill(pid, signal.SIGSTOP)
    else:
        runs.until(lambda: "nanosleep" in Path(f"/proc/{pid}/wchan").read_text(), "rank that sleeps in C")
    os.kill(process.pid, signal.SIGKILL)
    runs.until(lambda: not of_launch(process.pid), "end of all processes", limit=30)


def test_a_complete_run_says_so_and_goes_on_with_more_steps(runs: Runs) -> None:
    first = runs.finish("launch", "again", "--nodes", 2, "--steps", 40)
    code, output = runs.processes.wait(runs.start("launch", "again", "--nodes", 2, "--steps", 40))
    assert code == 0 and "already finished at step 40" in output
    assert runs.summary("again") == first, "a complete run is left as it is"
    more = runs.finish("launch", "again", "--nodes", 2, "--steps", 60)
    assert more["resumed_from_step"] == 40 and more["global_step"] == 60


def test_an_error_in_the_task_is_not_retried(runs: Runs) -> None:
    broken = (runs.folder / "small.py").read_text().replace("out = model(x)", "out = model(x) + undefined")
    (runs.folder / "small.py").write_text(broken)
    code, output = runs.processes.wait(runs.start("launch", "broken", "--nodes", 2))
    assert code == 1, output
    assert "undefined" in output and len(runs.events("broken", "world")) == 1
    assert runs.summary("broken")["state"] == "failed"


UNREADABLE = program_text("runs_unreadable")


@pytest.mark.soak
def test_what_another_node_alone_knows_is_on_node_zeros_page(runs: Runs) -> None:
    (runs.folder / "unreadable.py").write_text(UNREADABLE)
    flags = ("--nodes", 2, "--steps", 200, "--workers", 0, "--task", "unreadable.py:Unreadable")
    code, output = runs.processes.wait(runs.start("launch", "torn", *flags, delay=0.05))
    assert code == 1, output
    page = (runs.folder / "torn" / "metrics.prom").read_text()
    assert 'tandem_data_errors_total{node="1",reason="OSError"} 1.0' in page
    assert 'tandem_rank_memory_bytes{node="0",rank="0"}' in page
    assert 'tandem_rank_memory_bytes{node="1",rank="1"}' in page
    assert "tandem_collect_errors_total{" not in page


def node(runs: Runs, index: int, nodes: int, port: int, *flags: object, delay: float = 0.0) -> Any:
    place = ("--nodes", nodes, "--node-rank", index, "--master", f"127.0.0.101:{port}")
    return runs.start("launch", "many", *place, *flags, delay=delay)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_rank_0_is_on_node_0_of_twelve_also_after_its_restart(runs: Runs, free_port: int) -> None:
    flags = ("--steps", 60, "--checkpoint-every", 5, "--threads", 1)
    others = [node(runs, index, 12, free_port, *flags, delay=0.3) for index in range(1, 12)]
    first = node(runs, 0, 12, free_port, *flags, delay=0.3)
    runs.until(lambda: bool(runs.events("many", "checkpoint")), "first checkpoint", limit=300)
    assert "tandem-rank-0" in rank_processes(first.pid)
    os.kill(first.pid, signal.SIGKILL)
    again = node(runs, 0, 12, free_port, *flags, delay=0.3)
    runs.until(lambda: bool(runs.events("many", "resumed")), "second world", limit=200)
    assert "tandem-rank-0" in rank_processes(again.pid)
    ended = [runs.processes.wait(process, 200) for process in (again, *others)]
    assert [code for code, _ in ended] == [0] * 12, [output[-500:] for _, output in ended]
    assert runs.summary("many")["world_size"] == 12


@pytest.mark.soak
def test_digits_reach_98_percent_while_metrics_rise(runs: Runs, free_port: int) -> None:
    import urllib.request

    command = [
        sys.executable,
        "-m",
        "tandem",
        "launch",
        "--nproc",
        "2",
        "--run-dir",
        "digits",
        "--epochs",
        "2",
    ]
    command += ["--metrics", str(free_port), "--metrics-linger", "0"]
    process = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    seen: set[float] = set()

    def rising() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics", timeout=2) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return process.poll() is not None
        seen.update(float(line.split()[1]) for line in lines if line.startswith("tandem_global_step "))
        return len(seen) >= 3

    runs.until(rising, "rising step")
    code, output = runs.processes.wait(process)
    assert code == 0, output
    assert len(seen) >= 3
    assert runs.summary("digits")["eval"]["accuracy"] >= 0.98
