"""A crash that comes back with every start ends: counted in the run directory, given up with the reason."""

import pytest
from small_runs import Runs

from program_files import program_text

pytestmark = pytest.mark.timeout(600)
LIMIT = 250.0  # two nodes import torch in half a minute, on a busy machine in two

CRASHING = program_text("crash_loop_crashing")


def test_a_segmentation_fault_at_the_first_step_is_not_retried_for_ever(runs: Runs) -> None:
    (runs.folder / "crashing.py").write_text(CRASHING)
    flags = ("--task", "crashing.py:Crashing", "--steps", 50, "--max-restarts", 0, "--max-crash-loops", 1)
    code, output = runs.processes.wait(runs.start("launch", "crash", *flags), LIMIT)
    assert code == 200, output
    code, output = runs.processes.wait(runs.start("launch", "crash", *flags), LIMIT)
    assert code == 1, output
    assert "1 starts in a row have saved nothing new after step 0" in output
    assert "the restart budget (--max-restarts 0) is spent" in output.splitlines()[-1], output
    assert runs.summary("crash")["exit_code"] == 1
    assert not (runs.folder / "crash" / "starts.json").exists(), "a person may try again"
