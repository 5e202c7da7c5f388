"""What surrounds each forward pass of a run: one seeding, and the precision that was asked for."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from program_files import program_text

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

TASK = program_text("micro_steps_task")


def noted(processes: Any, folder: Path, *flags: str) -> list[dict[str, Any]]:
    (folder / "noted.py").write_text(TASK)
    words = ["train", "--task", "noted.py:Noted", "--batch-size", "8", "--steps", "3", "--run-dir", "run"]
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--threads", "1"]
    command = [sys.executable, "-m", "tandem", *words, *quiet, *flags]
    code, output = processes.run(command, cwd=folder)
    assert code == 0, output
    return [json.loads(line) for line in (folder / "noted.jsonl").read_text().splitlines()]


def test_each_forward_pass_is_seeded_once_and_with_a_seed_of_its_own(processes: Any, tmp_path: Path) -> None:
    calls = [each for each in noted(processes, tmp_path, "--micro-batch-size", "2") if each["training"]]
    assert {each["rows"] for each in calls} == {2}
    steps = calls[-3 * 4 :]  # of three steps of four micro-batches, after what is tried before the first
    assert Counter(len(each["seeds"]) for each in steps) == {1: 12}
    assert len({each["seeds"][0] for each in steps}) == 12


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16", "torch.bfloat16"), pytest.param("fp32", "torch.float32", marks=pytest.mark.soak)],
)
def test_every_pass_is_of_the_precision_asked_for(
    precision: str, expected: str, processes: Any, tmp_path: Path
) -> None:
    """The count of FLOPs and the evaluation were without autocast."""
    calls = noted(processes, tmp_path, "--precision", precision)
    assert Counter(each["training"] for each in calls)[False] >= 1 and len(calls) > 4
    assert {each["type"] for each in calls} == {expected}
