"""A script with a spare: it knows nothing of it, and has the ranks of the lost node again."""

import json
import os
import signal
from typing import Any

import pytest
from unchanged import PROGRAMS

from tree import of_launch

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TUTORIAL = str(PROGRAMS / "ddp_tutorial.py")


def test_a_spare_takes_the_place_of_a_lost_node_and_ends_with_the_script(scripts: Any) -> None:
    words = [TUTORIAL, "--epochs", 10, "--pause", "0.1"]
    process = scripts.start(scripts.tandem("--nodes", 2, "--spares", 1, *words))
    log = scripts.folder / "run/log/node-2.log"
    waits = "waits as a spare"
    scripts.until(lambda: log.exists() and waits in log.read_text(), process)
    scripts.until(lambda: (scripts.folder / "snapshot.pt").exists(), process)
    (node,) = [pid for pid, name in of_launch(process.pid).items() if name == "tandem-node-1"]
    os.kill(node, signal.SIGKILL)
    scripts.until(lambda: len(scripts.lives(1)) == 2, process)
    code, said = scripts.wait(process)
    assert code == 0, said
    assert "takes the place of node 1" in log.read_text() and "rank 1 of 2 on node 1 of 2" in log.read_text()
    assert waits in (scripts.folder / "run/log/node-1.log").read_text(), "it came back"
    assert "resuming from epoch" in scripts.log(0)
    summary = json.loads((scripts.folder / "run/summary.json").read_text())
    assert (summary["state"], summary["exit_code"], summary["nodes"]) == ("finished", 0, 2)
