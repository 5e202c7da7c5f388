"""Rare, long work in a loop is no hang, a hang is one, and the same hang twice ends the job."""

import os
from pathlib import Path
from typing import Any

import pytest
from own_loops import Scripts

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

LONG_SECONDS = float(os.environ.get("LONG_WORK_SECONDS", "11"))
"""More than ten: after those a rank was called hung. `LONG_WORK_SECONDS=90` is what is promised."""

LOOP = program_text("long_work_loop")

STUCK = program_text("long_work_stuck")


@pytest.fixture
def scripts(tmp_path: Path, processes: Any) -> Scripts:
    scripts = Scripts(tmp_path, processes)
    scripts.write("loop.py", LOOP)
    scripts.write("stuck.py", STUCK)
    return scripts


ALL_PLACES = ("data forward loss", "computing optimizer process", "thread between")
"""Of three runs at once, because most of them only wait."""


def test_long_work_in_a_step_raises_no_alarm_by_default(scripts: Scripts) -> None:
    begun = {
        f"run-{number}": scripts.launch(
            ["--nproc", "2"], "loop.py", f"run-{number}", PLACES=places, SECONDS=LONG_SECONDS
        )
        for number, places in enumerate(ALL_PLACES)
    }
    for run, process in begun.items():
        code, output = scripts.processes.wait(process, 120 + 3 * LONG_SECONDS)
        assert code == 0 and "hang:" not in output, output
        assert scripts.summary(run)["restarts"] == 0


@pytest.mark.parametrize("how", ["asleep", pytest.param("alone", marks=pytest.mark.soak)])
def test_the_same_hang_twice_ends_the_job_with_200(scripts: Scripts, how: str) -> None:
    words = ["--nproc", "2", "--hang-timeout", "3"]
    code, output = scripts.processes.wait(scripts.launch(words, "stuck.py", "run", HOW=how), 200)
    assert code == 200, output
    assert output.count("restarting all ranks") == 1, output
    (last,) = [line for line in output.splitlines() if "ended with code 200" in line]
    assert "step 30" in last and "the same hang" in last
    assert how == "alone" or "rank 1" in last
    assert scripts.summary("run")["restarts"] == 1
