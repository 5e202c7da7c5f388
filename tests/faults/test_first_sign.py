"""A node says that it lives before it has torch: a platform may publish its name only then.

And a person reads what a start that takes its time is at.
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
from small_runs import TASK, Runs

import tandem
from program_files import program_text
from tandem.telemetry import health

HOLD = program_text("first_sign_hold")
"""Every import of torch waits for a file."""


def held(runs: Runs) -> dict[str, str]:
    """The environment of a program whose import of torch is held."""
    (runs.folder / "held").mkdir()
    (runs.folder / "held/sitecustomize.py").write_text(HOLD)
    places = runs.folder / "held", Path(tandem.__file__).parents[1]
    return {**runs.environment, "PYTHONPATH": os.pathsep.join(map(str, places))}


def said_until(process: Any, line: str) -> str:
    """What it has said when this has come."""
    said = ""
    for each in process.stdout:
        said += each
        if line in each:
            return said
    raise AssertionError(f"no {line!r} in {said}")


@pytest.mark.parametrize("layout", [("--nodes", 2)])
def test_a_slow_start_says_what_it_is_at(layout: tuple[object, ...], runs: Runs) -> None:
    """Six seconds and more without a word before the live page, and again before the first step."""
    (runs.folder / "small.py").write_text(
        TASK.replace("        x = torch.randn(", "        time.sleep(4)\n        x = torch.randn(")
    )
    command = runs.command("launch", "first", *layout, "--steps", 3)
    process = runs.processes.start(command, cwd=runs.folder, env=held(runs))
    said_until(process, " node 0 | still importing torch")
    (runs.folder / "go").touch()
    code, more = runs.processes.wait(process)
    assert code == 0 and more.count("still building data and model") == 1, more
    assert "still importing torch\n" not in more and re.search(r"^run +first\n", more, re.M), more


def test_a_node_is_healthy_while_it_imports_torch(runs: Runs) -> None:
    state = runs.folder / "state"
    command = runs.command("launch", "first", "--nproc", 1, "--steps", 3)
    process = runs.processes.start(
        command, cwd=runs.folder, env={**held(runs), "TANDEM_STATE_DIR": str(state)}
    )
    runs.until(lambda: health.check(state)[0], "first sign of life")
    assert health.check(state)[1].startswith("starting at step 0")
    (runs.folder / "go").touch()
    code, output = runs.processes.wait(process)
    assert code == 0, output
