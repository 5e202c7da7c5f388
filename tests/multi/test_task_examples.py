"""The examples of what a task may have besides its three methods: they run, on any number of ranks."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.multi, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).parents[2] / "examples"


def trained(processes: Any, folder: Path, run: str, task: str, *flags: object) -> dict[str, Any]:
    words = ["launch", "--task", f"{EXAMPLES}/{task}", "--run-dir", run, *map(str, flags)]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("TANDEM_")}
    quiet = ["--metrics-port", "0", "--metrics-linger", "0", "--threads", "1"]
    command = [sys.executable, "-m", "tandem", *words, *quiet]
    code, output = processes.run(command, cwd=folder, env=environment)
    assert code == 0, output
    return dict(json.loads((folder / run / "summary.json").read_text()))


def test_scores_of_two_sets_and_all_outputs_end_a_run(processes: Any, tmp_path: Path) -> None:
    flags = ("--epochs", 50, "--eval-every", 20, "--keep-best", "val/auc", "--batch-size", 120)
    flags += ("--lr", 0.5, "--checkpoint-every", 20)
    task = "evaluations.py:Spam"
    two = trained(processes, tmp_path, "two", task, *flags, "--nproc", 2)
    assert two["ended_early"] and two["global_step"] < 50 * 40
    assert set(two["eval"]) == {"val/loss", "val/auc", "test/loss", "test/auc"}
    assert two["eval"]["test/auc"] > 0.9
    lines = [json.loads(line) for line in (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: line["eval"]["val/auc"] for line in lines if "eval" in line}
    best = max(scores.values())
    folders = (tmp_path / "two" / "checkpoints").glob("step-*")
    kept = [int(folder.name.removeprefix("step-")) for folder in folders]
    assert any(scores[step] == best for step in kept)
    command = [sys.executable, "-m", "tandem", "eval", "two", "--nproc", "3", "--json"]
    code, output = processes.run(command, cwd=tmp_path)
    assert code == 0, output
    again = json.loads(output.splitlines()[-1])["eval"]
    assert again["test/auc"] == pytest.approx(two["eval"]["test/auc"], abs=1e-6)


def test_batches_by_length_resume_exactly_and_are_those_of_any_number_of_ranks(
    processes: Any, tmp_path: Path
) -> None:
    flags = ("--optimizer", "adamw", "--lr", 0.003, "--batch-size", 32)
    flags += ("--task.lines", 320, "--task.width", 16)
    task = "sentences.py:Sentences"
    calm = trained(processes, tmp_path, "calm", task, *flags, "--steps", 14, "--nproc", 2)
    trained(processes, tmp_path, "run", task, *flags, "--steps", 6, "--nproc", 2)
    again = trained(processes, tmp_path, "run", task, *flags, "--steps", 14, "--nproc", 2)
    assert again["resumed_from_step"] == 6 and again["weights_sha256"] == calm["weights_sha256"]
    alone = trained(processes, tmp_path, "alone", task, *flags, "--steps", 14, "--nproc", 1)
    assert alone["eval"]["loss"] == pytest.approx(calm["eval"]["loss"], rel=1e-4)
