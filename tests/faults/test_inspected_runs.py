"""Looking inside runs that train: real launches of tasks, scripts and custom loops, not prepared for it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_runs import Runs

from patience import patient
from program_files import program_text

pytestmark = pytest.mark.timeout(300)


def verb(runs: Runs, *words: object) -> tuple[int, str]:
    """Exit code and output of a verb, from another process."""
    command = [sys.executable, "-m", "tandem", *map(str, words)]
    done = subprocess.run(
        command, cwd=runs.folder, env=runs.environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode, done.stdout + done.stderr


def all_at_their_place(logs: Path, ranks: int) -> bool:
    found = [logs / f"rank-{rank}.log" for rank in range(ranks)]
    return all(path.exists() and "at its place" in path.read_text() for path in found)


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
    assert time.monotonic() - began < patient(2), said
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
    flags = ("--nodes", 2, "--steps", 200, "--checkpoint-every", 20, "--threads", 1)
    process = runs.start("launch", "run", *flags, delay=0.05)
    runs.wait_for_step("run", 20)
    code, said = verb(runs, "stacks", "run")
    assert code == 0 and "rank 0 on node 0" in said and "rank 1 on node 1" in said, said
    assert "training/loop.py" in said, said
    code, said = runs.processes.wait(process)
    assert code == 0, said
    assert runs.summary("run")["weights_sha256"] == undisturbed
    assert runs.summary("run")["restarts"] == 0
    assert not os.path.exists(runs.folder / "run" / "log" / "inspection.json")
