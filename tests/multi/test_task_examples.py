"""The examples of what a task may have besides its three methods: they run, on any number of ranks."""

import json
import os
import re
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_batches_by_length_resume_exactly(processes: Any, tmp_path: Path) -> None:
    flags = ("--optimizer", "adamw", "--lr", 0.003, "--batch-size", 32, "--schedule", "constant")
    flags += ("--task.lines", 320, "--task.width", 16)
    task = "sentences.py:Sentences"
    calm = trained(processes, tmp_path, "calm", task, *flags, "--steps", 14, "--nproc", 1)
    trained(processes, tmp_path, "run", task, *flags, "--steps", 6, "--nproc", 1)
    again = trained(processes, tmp_path, "run", task, *flags, "--steps", 14, "--nproc", 1)
    assert again["resumed_from_step"] == 6 and again["weights_sha256"] == calm["weights_sha256"]
    assert again["eval"] == calm["eval"]


def code_lines(name: str) -> int:
    """Lines with code on them."""
    lines = (EXAMPLES / name).read_text().partition('"""\n')[2].splitlines()
    return sum(bool(line.strip()) for line in lines)


@pytest.mark.slow
def test_a_whole_script_as_a_task_loses_nothing_and_is_shorter(processes: Any, tmp_path: Path) -> None:
    assert code_lines("whole_script.py") < 50 < code_lines("whole_script_plain.py")
    plain = str(EXAMPLES / "whole_script_plain.py")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", plain]
    code, output = processes.run([sys.executable, *words], limit=150, cwd=tmp_path)
    assert code == 0, output
    top1, top5 = map(float, re.findall(r"top1 ([\d.]+), top5 ([\d.]+)", output)[-1])
    flags = ("--epochs", 6, "--batch-size", 120, "--micro-batch-size", 30, "--nproc", 2)
    ours = trained(processes, tmp_path, "whole", "whole_script.py:Whole", *flags)
    assert ours["eval"]["top1"] == pytest.approx(top1, abs=0.03) and top1 > 0.7
    assert ours["eval"]["top5"] == pytest.approx(top5, abs=0.02)
