"""Who was killed is said where a person looks, on node 0's terminal and in the events, for any node's rank.

What gloo has to say about it is in the rank's log, and nowhere else.
"""

import os
import re
import signal

import pytest
from small_runs import Runs, rank_processes

pytestmark = pytest.mark.timeout(300)

FLAGS = ("--steps", 120, "--checkpoint-every", 20, "--threads", 1)
SAID = re.compile(
    r"rank (\d) on node (\d) was killed \((\w+)\); training again after [\d.]+ .+?, (\d+) steps? lost"
)


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_a_killed_rank_is_named_with_what_it_cost(nodes: int, runs: Runs) -> None:
    layout = ("--nproc", 2) if nodes == 1 else ("--nodes", 2)
    process = runs.start("launch", "run", *layout, *FLAGS, delay=0.03)
    runs.wait_for_step("run", 20)
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)
    code, said = runs.processes.wait(process)
    assert code == 0, said
    (found,) = SAID.findall(said)
    assert found[:3] == ("1", str(nodes - 1), "SIGKILL"), said
    (event,) = runs.events("run", "rank_killed")
    assert (event["rank"], event["node"], event["signal"]) == (1, nodes - 1, "SIGKILL")
    assert event["seconds"] >= 0 and event["steps_lost"] == int(found[3])
    assert "gloo" not in said and ".cc:" not in said, said
    log = (runs.folder / "run" / "log" / "rank-0.log").read_text()
    lost = [line for line in log.splitlines() if "lost the other ranks" in line]  # or killed before
    assert all("lost the other ranks: " in line and "gloo" in line for line in lost), log

