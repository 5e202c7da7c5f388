"""`--log-format json`: every line on stderr is a JSON object, also what C++ says of a lost master."""

import json
import sys
import time

import pytest
from small_runs import Runs

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


def test_a_lost_master_leaves_json_lines(runs: Runs, free_port: int) -> None:
    flags = ("--nodes", 2, "--master", f"127.0.0.101:{free_port}", "--steps", 100_000, "--log-format", "json")
    node_0 = runs.start("launch", "run", "--node-rank", 0, *flags, delay=0.02)
    command = runs.command("launch", "run", "--node-rank", 1, *flags, delay=0.02)
    said = runs.folder / "node-1.txt"
    with said.open("w") as file:
        node_1 = runs.processes.start(command, cwd=runs.folder, env=runs.environment, stdout=file)
    runs.wait_for_step("run", 5)
    node_0.kill()
    runs.until(lambda: '"output"' in said.read_text(), "words of torch on the loss of the store")
    time.sleep(3)  # node 1 loses its rank's peer too, and waits for the master
    node_1.terminate()
    code, _ = runs.processes.wait(node_1, 120)
    assert code in (137, 143), said.read_text()
    records = [json.loads(line) for line in said.read_text().splitlines()]
    assert any("output" in each for each in records), "torch has printed frames"
    assert {"time", "level", "rank", "node", "step", "message"} <= set.intersection(*map(set, records))


def test_a_killed_node_is_restarted_as_with_text(runs: Runs) -> None:
    """What writes the JSON of another node was taken for something that the killed one had left behind."""
    process = runs.start("launch", "run", "--nodes", 2, "--steps", 400, "--log-format", "json", delay=0.02)
    runs.wait_for_step("run", 5)
    kill = [sys.executable, "-m", "tandem", "kill", "run", "--node", "1"]
    assert runs.processes.run(kill, cwd=runs.folder, env=runs.environment)[0] == 0
    runs.until(lambda: len(runs.events("run", "training")) == 2, "training after the restart")
    runs.hurry()
    code, said = runs.processes.wait(process, 120)
    assert code == 0, said
    assert any("restarting" in json.loads(line)["message"] for line in said.splitlines()), said
    assert runs.summary("run")["global_step"] == 400
