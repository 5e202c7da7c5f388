"""`--snapshot-every auto`: a small state is kept at every step, a large one as often as its copy allows."""

from pathlib import Path
from typing import Any

import pytest
from small_runs import Runs

from program_files import program_text
from tandem.training.saving import LONGEST_SECONDS

pytestmark = pytest.mark.timeout(300)
STEPS = 200
LARGE = 32  # MiB: 16 for each of two ranks, which is more than is copied at every step


def trained(runs: Runs, name: str, megabytes: int, steps: int, last: int = 0) -> dict[str, Any]:
    (runs.folder / "large.py").write_text(program_text("large_state_task"))
    (runs.folder / name / "notes").mkdir(parents=True)
    task = ("--task", "large.py:Large", "--task.megabytes", megabytes, "--task.notes", f"{name}/notes")
    every = ("--checkpoint-every", "never", "--eval-every", "never", "--steps", steps)
    return runs.finish("launch", f"{name}/run", "--nproc", 2, *task, "--task.last", last, *every)


def taken(folder: Path) -> list[int]:
    """The steps of which there was a snapshot: the same on both ranks, as all of them take it together."""
    first, second = (
        sorted({int(line) for line in (folder / f"notes/rank-{rank}").read_text().split()}) for rank in (0, 1)
    )
    assert first == second
    return first


def interval(run: Path) -> float:
    """What the run's metrics show at its end."""
    lines = (run / "metrics.prom").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("tandem_snapshot_interval_seconds "))
    return float(line.split()[1])


def test_a_small_state_is_kept_at_every_step(runs: Runs) -> None:
    trained(runs, "small", 1, 40)
    assert taken(runs.folder / "small") == [*range(1, 41)]
    assert interval(runs.folder / "small/run") == 0


def test_a_large_state_is_kept_at_some_steps_and_a_killed_rank_resumes_from_the_newest(runs: Runs) -> None:
    calm = trained(runs, "calm", LARGE, STEPS)
    steps = taken(runs.folder / "calm")
    assert steps[0] == 1 and steps[-1] == STEPS and 3 <= len(steps) < STEPS, steps
    assert 0 < interval(runs.folder / "calm/run") <= LONGEST_SECONDS
    killed = trained(runs, "killed", LARGE, STEPS, last=STEPS - 20)
    died, newest = map(int, (runs.folder / "killed/notes/died").read_text().split())
    assert killed["restarts"] == 1 and killed["resumed_from_step"] == newest
    assert killed["weights_sha256"] == calm["weights_sha256"]
    (resumed,) = runs.events("killed/run", "resumed")
    assert resumed["source"] == "memory of this node"
    (event,) = runs.events("killed/run", "rank_killed")
    assert 0 <= event["steps_lost"] <= died - newest
