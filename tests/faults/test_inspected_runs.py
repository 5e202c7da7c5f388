"""Looking inside runs that train: real launches of tasks, scripts and custom loops, not prepared for it."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import Runs

from json_shapes import shape
from patience import patient
from program_files import program_text

pytestmark = pytest.mark.timeout(300)
GOLDEN = Path(__file__).parents[1] / "unit" / "golden"


def verb(runs: Runs, *words: object) -> tuple[int, str]:
    """Exit code and output of a verb, from another process."""
    command = [sys.executable, "-m", "tandem", *map(str, words)]
    done = subprocess.run(
        command, cwd=runs.folder, env=runs.environment, capture_output=True, text=True, timeout=patient(120)
    )
    return done.returncode, done.stdout + done.stderr


def all_at_their_place(logs: Path, ranks: int) -> bool:
    found = [logs / f"rank-{rank}.log" for rank in range(ranks)]
    return all(path.exists() and "at its place" in path.read_text() for path in found)


def posted(address: str, headers: dict[str, str]) -> tuple[int, str]:
    """Status and body of a request for stacks to the page."""
    connection = http.client.HTTPConnection(address, timeout=patient(30))
    connection.request("POST", "/api/inspect/stacks", headers=headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def check_trace(run: Path, ranks: int, steps: int) -> None:
    """One row per rank, the same steps on all of them, and clocks that agree within a millisecond."""
    (path,) = (run / "profile").glob("steps-*.json")
    first, last = map(int, path.stem.split("-")[1:])
    assert last - first == steps - 1
    trace = json.loads(path.read_text())
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == set(range(ranks))
    for row in trace["tandem"]["ranks"]:
        assert (row["after"], row["steps"]) == (first - 1, steps)
        assert row["clock_uncertainty_us"] + abs(row["clock_ahead_us"]) < 1000
    for rank in range(ranks):
        ends = [each for each in events if each["pid"] == rank and each["name"].startswith("Optimizer.step#")]
        # A script's steps begin and end inside an optimizer's step, so the last one has no end.
        assert steps - 1 <= len(ends) <= steps, ends
    now = time.time()
    begins = [trace["baseTimeNanoseconds"] / 1e9 + event["ts"] / 1e6 for event in events]
    assert now - 120 < min(begins) <= max(begins) < now, "on the wall clock"


def test_four_ranks_at_four_places_are_found_within_two_seconds(runs: Runs) -> None:
    """Asleep, in a collective, in native code that holds the GIL, and computing; on two nodes."""
    (runs.folder / "places.py").write_text(program_text("inspection_places"))
    ours = ["--metrics", "0", "--metrics-linger", "0", "--hang-timeout", "100", "--run-dir", "run"]
    command = [sys.executable, "-m", "tandem", "launch", *ours, "--nodes", "2", "--nproc", "2", "places.py"]
    process = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    deadline = time.monotonic() + patient(100)
    while not all_at_their_place(runs.folder / "run" / "log", 4):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1)
    began = time.monotonic()
    code, said = verb(runs, "stacks", "run")
    # Two seconds, and what a busy machine adds.
    assert time.monotonic() - began < patient(6), said
    assert code == 0, said
    blocks = dict(zip(range(4), said.split("\n\n"), strict=True))
    for rank, (line, function) in enumerate(
        [(21, "asleep"), (25, "in_a_collective"), (29, "in_native_code"), (34, "computing")]
    ):
        assert f"rank {rank} on node {rank // 2}" in blocks[rank], said
        assert f"places.py:{line} in {function}" in blocks[rank], said
    assert "runs no Python" in blocks[2] and "tandem/launch" not in said
    process.terminate()
    runs.processes.wait(process)
    code, said = verb(runs, "stacks", "run")
    assert code == 2 and len(said.splitlines()) == 1, said


def test_a_task_is_looked_into_while_it_trains(runs: Runs) -> None:
    undisturbed = runs.undisturbed("--steps", 200)
    (runs.folder / "token").write_text("word")
    flags = ("--nodes", 2, "--steps", 200, "--checkpoint-every", 20, "--threads", 1)
    flags = (*flags, "--metrics-token-file", "token")
    process = runs.start("launch", "run", *flags, delay=0.05)
    runs.wait_for_step("run", 20)
    code, said = verb(runs, "stacks", "run")
    assert code == 0 and "rank 0 on node 0" in said and "rank 1 on node 1" in said, said
    assert "training/loop.py" in said, said
    code, said = verb(runs, "profile", "run", "--steps", 4)
    assert code == 0, said
    check_trace(runs.folder / "run", ranks=2, steps=4)
    for words in (("stacks",), ("profile", "--steps", 2), ("memory", "--seconds", 1)):
        code, said = verb(runs, words[0], "run", *words[1:], "--json")
        golden = json.loads((GOLDEN / f"{words[0]}.json").read_text())
        assert code == 0 and shape(json.loads(said)) == golden, json.dumps(shape(json.loads(said)), indent=2)
    log = (runs.folder / "run" / "log" / "node-0.log").read_text()
    (address,) = re.findall(r"live page at http://([\d.:]+)/", log)
    assert posted(address, {"X-Tandem": "test"})[0] == 401
    code, said = posted(address, {"X-Tandem": "test", "Authorization": "Bearer word"})
    assert code == 200 and "rank 1 on node 1" in json.loads(said)["text"], said
    code, said = runs.processes.wait(process)
    assert code == 0, said
    assert runs.summary("run")["weights_sha256"] == undisturbed
    assert runs.summary("run")["restarts"] == 0
    assert not os.path.exists(runs.folder / "run" / "log" / "inspection.json")


def test_a_script_is_profiled_and_its_weights_are_those_of_a_calm_run(runs: Runs) -> None:
    text = program_text("inspection_script")
    (runs.folder / "trains.py").write_text(text)
    ours = ["--metrics", "0", "--metrics-linger", "0", "--nproc", "2"]

    def launch(run: str) -> list[str]:
        return [sys.executable, "-m", "tandem", "launch", *ours, "--run-dir", run, "trains.py", f"{run}.pt"]

    process = runs.processes.start(launch("run"), cwd=runs.folder, env=runs.environment)
    runs.until(lambda: (runs.folder / "run" / "log" / "inspection.json").exists(), "agent")
    runs.until(lambda: verb(runs, "profile", "run")[0] == 0, "profile")
    check_trace(runs.folder / "run", ranks=2, steps=5)
    code, said = verb(runs, "memory", "run", "--seconds", 1)
    assert code == 0 and said.count("resident memory") == 2, said
    assert "float32 [16, 16] on cpu" in said and "and still in use" in said, said
    code, said = runs.processes.wait(process)
    assert code == 0 and "profiler" not in said.lower(), said
    code, said = runs.processes.run(launch("calm"), 200, cwd=runs.folder, env=runs.environment)
    assert code == 0, said
    assert (runs.folder / "run.pt").read_bytes() == (runs.folder / "calm.pt").read_bytes()


def test_a_custom_loop_is_profiled(runs: Runs) -> None:
    text = program_text("own_loops_small").replace("    seen += 1\n", "    seen += 1\n    time.sleep(0.05)\n")
    (runs.folder / "loop.py").write_text("import time\n" + text.replace("epochs=3", "epochs=12"))
    ours = ["--metrics", "0", "--metrics-linger", "0", "--nproc", "2", "--run-dir", "run"]
    command = [sys.executable, "-m", "tandem", "launch", *ours, "loop.py"]
    process = runs.processes.start(command, cwd=runs.folder, env=runs.environment)
    runs.until(lambda: (runs.folder / "run" / "log" / "inspection.json").exists(), "agent")
    runs.until(lambda: verb(runs, "profile", "run", "--steps", 3)[0] == 0, "profile")
    check_trace(runs.folder / "run", ranks=2, steps=3)
    code, said = verb(runs, "stacks", "run")
    assert code == 0 and "loop.py:" in said, said
    code, said = runs.processes.wait(process)
    assert code == 0, said
