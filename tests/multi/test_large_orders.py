"""Runs on a million samples, whose order is computed: exact resume, and checkpoints of torch's order."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import PROGRAMS
from tandem.checkpoint.manifest import seal

pytestmark = [pytest.mark.multi, pytest.mark.timeout(200)]

PROGRAM = PROGRAMS / "large_order_task.py"


def train(processes: Any, folder: Path, form: str, run: str, steps: int, *flags: object) -> tuple[int, str]:
    quiet = ("--threads", 1, "--metrics", 0, "--metrics-linger", 0)
    every = ("--run-dir", folder / run, "--checkpoint-every", 5, "--keep-every", 5, *quiet, *flags)
    if form == "task":
        words = ("train", "--task", f"{PROGRAM}:Large", "--batch-size", 100_000, "--steps", steps, *every)
    else:
        words = ("launch", *every, PROGRAM, steps)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    command = [sys.executable, "-m", "tandem", *map(str, words)]
    code, output = processes.run(command, 90, cwd=folder, env=kept)
    return code, output


def saved_until(folder: Path, step: int, name: str, forget_order: bool = False) -> Path:
    """A copy of the calm run's checkpoints up to `step`, as a version with torch's order alone wrote them."""
    for there in sorted((folder / "calm" / "checkpoints").glob("step-*")):
        if int(there.name.partition("-")[2]) > step:
            continue
        here = shutil.copytree(there, folder / name / "checkpoints" / there.name)
        manifest = here / "manifest.json"
        body = json.loads(manifest.read_bytes())
        assert body["info"]["data"]["order"] == "feistel"
        if forget_order:
            del body["manifest_sha256"], body["info"]["data"]["order"]
            manifest.write_bytes(seal(body))
    return folder / name


@pytest.mark.parametrize("form", ["task", "loop"])
def test_a_computed_order_resumes_exactly_and_one_of_torch_at_an_epochs_end_alone(
    processes: Any, tmp_path: Path, form: str
) -> None:
    code, output = train(processes, tmp_path, form, "calm", 25)
    assert code == 0, output
    calm = json.loads((tmp_path / "calm" / "summary.json").read_text())["weights_sha256"]

    def resumed(run: str, step: int, *flags: object) -> tuple[str, str]:
        code, output = train(processes, tmp_path, form, run, 25, *flags)
        assert code == 0, output
        seen = json.loads((tmp_path / run / "summary.json").read_text())
        assert seen["resumed_from_step"] == step
        return seen["weights_sha256"], output

    saved_until(tmp_path, 15, "same")
    assert resumed("same", 15)[0] == calm
    older = saved_until(tmp_path, 15, "older", forget_order=True)
    code, output = train(processes, tmp_path, form, "older", 25)
    errors = [line for line in output.splitlines() if "cannot resume" in line]
    assert code == 2 and errors and "Traceback" not in output, output
    assert all("step 15" in line and "--resume PATH@STEP" in line and "of 10)" in line for line in errors)
    # What it advises: from the end of the epoch, nothing differs.
    assert resumed("older", 10, "--resume", f"{older}@10")[0] == calm
    saved_until(tmp_path, 15, "forced", forget_order=True)
    _, output = resumed("forced", 15, "--on-data-change", "continue")
    assert "'torch'" in output and "'feistel'" in output
