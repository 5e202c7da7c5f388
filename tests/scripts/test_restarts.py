"""A plain DDP script: the loss that torchrun gives, what is started again, and what is not."""

import json
import os
import re
import signal
import time
import urllib.request
from typing import Any

import pytest
from unchanged import PROGRAMS

from patience import patient
from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

TUTORIAL = str(PROGRAMS / "ddp_tutorial.py")

SLOW = program_text("restarts_slow")
"""Its first generation computes for a minute after its first step."""


def final_loss(text: str) -> float:
    (found,) = re.findall(r"^final loss (\S+)$", text, re.M)
    return float(found)


FAILS_EARLY = """
import os, torch.distributed as dist
if os.environ["RANK"] == FAILING:
    raise ValueError("no data on this node")
dist.init_process_group("gloo")
"""


@pytest.mark.parametrize("failing", [1, 0])
def test_an_error_before_the_ranks_have_met_ends_those_that_wait(scripts: Any, failing: int) -> None:
    """They waited for the failed rank until the timeout of init_process_group, half an hour."""
    (scripts.folder / "early.py").write_text(FAILS_EARLY.replace("FAILING", f"'{failing}'"))
    code, said = scripts.run(scripts.tandem("--nodes", 2, "early.py"))
    assert code == 1 and "no data on this node" in said, said
    assert f"rank {failing} on node {failing}" in said, said


@pytest.mark.soak
def test_a_script_has_the_same_loss_as_under_torchrun(scripts: Any) -> None:
    code, said = scripts.by_torchrun("--nproc-per-node", 2, TUTORIAL, "--snapshot", "theirs.pt")
    assert code == 0, said
    code, ours = scripts.run(scripts.tandem("--nodes", 2, TUTORIAL, "--snapshot", "ours.pt"))
    assert code == 0, ours
    assert final_loss(ours) == pytest.approx(final_loss(said), rel=1e-6)
    assert final_loss(scripts.log(0)) == final_loss(ours)


@pytest.mark.core
def test_a_killed_rank_is_started_again_and_the_script_goes_on_from_its_own_snapshot(scripts: Any) -> None:
    words = [TUTORIAL, "--epochs", 8, "--pause", "0.1", "--workers", 1]
    process = scripts.start(scripts.tandem("--nodes", 2, *words))
    for lives in (1, 2):
        scripts.until(lambda: (scripts.folder / "snapshot.pt").exists(), process)
        os.kill(scripts.lives(1)[-1], signal.SIGKILL)
        scripts.until(lambda n=lives: min(len(scripts.lives(0)), len(scripts.lives(1))) > n, process)
    code, said = scripts.wait(process)
    assert code == 0, said
    log = scripts.log(0)
    assert re.findall(r"^resuming from epoch (\d+)$", log, re.M), log
    assert len(scripts.lives(1)) == 3
    node_1 = (scripts.folder / "run/log/node-1.log").read_text()
    assert "rank 1 on node 1 (127.0.0.102) was killed (SIGKILL)" in node_1
    final_loss(log)
    summary = json.loads((scripts.folder / "run" / "summary.json").read_text())
    assert (summary["state"], summary["exit_code"], summary["restarts"]) == ("finished", 0, 2)


def test_a_rank_killed_while_the_other_computes_is_named_on_the_terminal(scripts: Any) -> None:
    """Node 0 hears of it by the node that comes back, and said no more than that a node wanted to join."""
    (scripts.folder / "slow.py").write_text(SLOW)
    process = scripts.start(scripts.tandem("--nodes", 2, "slow.py"))
    scripts.until(lambda: (scripts.folder / "computing").exists(), process)
    time.sleep(0.5)  # until rank 1 has its gradients, too
    os.kill(scripts.lives(1)[-1], signal.SIGKILL)
    code, said = scripts.wait(process)
    assert code == 0, said
    assert "rank 1 on node 1 was killed (SIGKILL); restarting all ranks" in said, said
    assert re.search(r"rank 1 on node 1 was killed .+; training again after [\d.]+ s$", said, re.M), said


@pytest.mark.parametrize(
    "ranks",
    [pytest.param(["--nodes", 2], marks=pytest.mark.soak), ["--nproc", 2]],
    ids=["nodes", "one-node"],
)
def test_a_bug_of_the_script_is_not_started_again_and_is_shown_once(scripts: Any, ranks: list[Any]) -> None:
    code, said = scripts.run(scripts.tandem(*ranks, TUTORIAL, "--bug-at", "1:3"))
    assert code == 1, said
    assert said.count("Traceback") == 1 and said.count("ValueError: a bug of rank 1") == 1, said
    assert re.search(r"rank 1 on node \d \(127\.0\.0\.\d+\) ended with 1", said), said
    assert "restarting all ranks" not in said
    assert len(scripts.lives(0)) == len(scripts.lives(1)) == 1


def test_restart_on_error_is_torchruns_way(scripts: Any) -> None:
    settings = ["--nproc", 2, "--restart-on-error", "--max-restarts", 1]
    code, said = scripts.run(scripts.tandem(*settings, TUTORIAL, "--bug-at", "0:3"))
    assert code == 200, said
    assert len(scripts.lives(1)) == 2


def metrics(port: int) -> str:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=patient(5)) as page:
            return str(page.read().decode())
    except OSError:
        return ""


def test_a_stopped_rank_is_named_with_its_line_and_the_page_knows_steps(scripts: Any, free_port: int) -> None:
    ours = scripts.tandem("--nodes", 2, "--hang-timeout", 4, "--metrics", free_port)
    process = scripts.start([*ours, TUTORIAL, "--epochs", "5", "--pause", "0.2"])
    scripts.until(lambda: re.search(r"^tandem_steps_total ([2-9]|1\d)", metrics(free_port), re.M), process)
    (pid,) = scripts.lives(1)
    os.kill(pid, signal.SIGSTOP)
    scripts.until(lambda: len(scripts.lives(1)) == 2, process)
    once_more = 'tandem_restarts_total{reason="hang"} 1'
    page = scripts.until(lambda: once_more in (text := metrics(free_port)) and text, process)
    assert re.search(r"^tandem_world_size 2", page, re.M) and re.search(r"^tandem_nodes 2", page, re.M)
    code, said = scripts.wait(process)
    assert code == 0, said
    who = r"hang: rank 1 on node 1 \(127\.0\.0\.102\) has sent no heartbeat for"
    assert re.search(who + r" [\d.]+ s \(phase ddp_tutorial\.py:\d+, step \d+\)", said), said


def test_a_script_that_ends_too_early_on_one_rank_is_no_success(scripts: Any) -> None:
    (scripts.folder / "early.py").write_text("""
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    dist.all_reduce(torch.ones(1))
""")
    code, said = scripts.run(scripts.tandem("--nproc", 2, "early.py"))
    assert code == 1, said


@pytest.mark.parametrize(
    ("command", "code", "reason"),
    [
        ("sleep $((5 - RANK * 5)); exit $((RANK * 3))", 3, "rank 1 on node 1 (127.0.0.102) ended with 3"),
        pytest.param("sleep $((RANK * 2)); exit $((RANK * 3))", 3, "(127.0.0.102) ended with 3",
                     marks=pytest.mark.soak),
        pytest.param("sleep $((RANK * 15))", 0, "", marks=pytest.mark.soak),
        pytest.param("sleep $((RANK * 2)); [ $RANK = 0 ] || kill -9 $$", 1, "was killed (SIGKILL)",
                     marks=pytest.mark.soak),
    ],
    ids=["earlier", "later", "well, much later", "killed later"],
)  # fmt: skip
def test_a_program_ends_as_the_ranks_of_all_nodes_do(
    scripts: Any, command: str, code: int, reason: str
) -> None:
    """Node 0, whose rank ends well, said of the run that it had finished, and ended others after 10 s."""
    ended, said = scripts.run(scripts.tandem("--nodes", 2, "--", "bash", "-c", command))
    summary = json.loads((scripts.folder / "run" / "summary.json").read_text())
    state = "failed" if code else "finished"
    assert (ended, summary["exit_code"], summary["state"]) == (code, code, state), said
    assert reason in str(summary["reason"])
    if code:
        assert reason in said.splitlines()[-1], said


def test_any_command_gets_the_ranks_and_its_codes_are_passed_on(scripts: Any) -> None:
    words = ["--nproc", 2, "--", "bash", "-c", 'echo "$RANK of $WORLD_SIZE"; exit $((RANK * 5))']
    code, said = scripts.run(scripts.tandem(*words))
    assert code == 5, said
    assert "0 of 2" in said and scripts.log(1) == "1 of 2\n"
