"""A task whose loss and collate go by step and epoch: in a run that goes on, and what follows it."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

QUIET = ("--metrics", 0, "--metrics-linger", 0)

TASK = program_text("step_and_epoch_task")


def tandem(processes: Any, folder: Path, *words: object) -> str:
    quiet = ["--threads", "1"]
    code, output = processes.run([sys.executable, "-m", "tandem", *map(str, words), *quiet], cwd=folder)
    assert code == 0, output
    return str(output)


def trained(processes: Any, folder: Path, run: str, steps: int, *flags: object) -> dict[str, Any]:
    words = ("--batch-size", 8, "--schedule", "constant", "--lr", 0.001, "--steps", steps, "--log-every", 1)
    tandem(
        processes, folder, *("train", "--task", "fades.py:Fades", "--run-dir", run), *words, *flags,
        *QUIET,
    )  # fmt: skip
    return dict(json.loads((folder / run / "summary.json").read_text()))


def test_step_and_epoch_are_those_of_the_step(processes: Any, tmp_path: Path) -> None:
    """The loss itself compares what it is told with what its batch was told, before the first step too."""
    (tmp_path / "fades.py").write_text(TASK)
    trained(processes, tmp_path, "run", 7)
    again = trained(processes, tmp_path, "run", 12, "--workers", 1)
    assert again["resumed_from_step"] == 7 and again["eval"]["step"] == 11 and again["eval"]["epoch"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line["scores"] for line in lines if line.get("scores")}
    assert steps == {step + 1: {"step": step, "epoch": step // 5} for step in range(12)}
    said = tandem(processes, tmp_path, "eval", "run", "--json")
    assert json.loads(said.splitlines()[-1])["eval"] == pytest.approx(again["eval"])


@pytest.mark.soak
def test_a_loss_by_step_resumes_exactly(processes: Any, tmp_path: Path) -> None:
    (tmp_path / "fades.py").write_text(TASK)
    calm = trained(processes, tmp_path, "calm", 12)
    trained(processes, tmp_path, "run", 7, "--workers", 1)
    again = trained(processes, tmp_path, "run", 12)
    assert again["weights_sha256"] == calm["weights_sha256"] and again["eval"] == calm["eval"]
    two = ("launch", "--task", "fades.py:Fades", "--nproc", 2, "--batch-size", 8, "--micro-batch-size", 2)
    tandem(processes, tmp_path, *two, "--steps", 6, "--run-dir", "two", *QUIET)
