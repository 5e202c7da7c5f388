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
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--threads", "1"]
    command = [sys.executable, "-m", "tandem", *words, *quiet]
    code, output = processes.run(command, cwd=folder, env=environment)
    assert code == 0, output
    return dict(json.loads((folder / run / "summary.json").read_text()))


@pytest.mark.soak
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


def test_batches_by_length_resume_exactly(processes: Any, tmp_path: Path) -> None:
    flags = ("--optimizer", "adamw", "--lr", 0.003, "--batch-size", 32, "--schedule", "constant")
    flags += ("--task.lines", 320, "--task.width", 16)
    task = "sentences.py:Sentences"
    calm = trained(processes, tmp_path, "calm", task, *flags, "--steps", 14, "--nproc", 1)
    trained(processes, tmp_path, "run", task, *flags, "--steps", 6, "--nproc", 1)
    again = trained(processes, tmp_path, "run", task, *flags, "--steps", 14, "--nproc", 1)
    assert again["resumed_from_step"] == 6 and again["weights_sha256"] == calm["weights_sha256"]
    assert again["eval"] == calm["eval"]


def test_a_rare_class_is_drawn_as_often_as_the_other(processes: Any, tmp_path: Path) -> None:
    """Training draws it in half of all places; the evaluation set has it as rarely as it is."""
    flags = ("--batch-size", 120, "--steps", 100, "--log-every", 100, "--lr", 0.1, "--schedule", "constant")
    seen = trained(processes, tmp_path, "run", "rare_class.py:RareClass", *flags, "--nproc", 1)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    [drawn] = [line["scores"]["rare"] for line in lines if line.get("scores")]
    assert drawn == pytest.approx(0.5, abs=0.02)
    assert seen["eval"]["rare"] < 0.04 and seen["eval"]["recall"] > 0.8


DEPTH = ("--batch-size", 120, "--schedule", "constant", "--lr", 0.05, "--strategy", "ddp")


@pytest.mark.soak
def test_blocks_that_are_left_out_need_find_unused(processes: Any, tmp_path: Path) -> None:
    task = "stochastic_depth.py:StochasticDepth"
    seen = trained(processes, tmp_path, "run", task, *DEPTH, "--steps", 40, "--find-unused", "--nproc", 1)
    assert seen["global_step"] == 40 and seen["eval"]["accuracy"] > 0.4


def test_two_ranks_leave_out_blocks_of_their_own_and_resume_exactly(processes: Any, tmp_path: Path) -> None:
    flags, task = (*DEPTH, "--nproc", 2), "stochastic_depth.py:StochasticDepth"
    calm = trained(processes, tmp_path, "calm", task, *flags, "--steps", 30, "--find-unused")
    trained(processes, tmp_path, "run", task, *flags, "--steps", 12, "--find-unused")
    again = trained(processes, tmp_path, "run", task, *flags, "--steps", 30, "--find-unused")
    assert again["resumed_from_step"] == 12 and again["weights_sha256"] == calm["weights_sha256"]
    words = ["launch", "--task", f"{EXAMPLES}/{task}", "--run-dir", "without", *map(str, flags)]
    quiet = ["--metrics", "0", "--metrics-linger", "0", "--threads", "1", "--steps", "30"]
    code, output = processes.run([sys.executable, "-m", "tandem", *words, *quiet], cwd=tmp_path)
    assert code in (1, 2) and "--find-unused" in output, output


@pytest.mark.soak
def test_a_rare_class_on_two_ranks(processes: Any, tmp_path: Path) -> None:
    flags = ("--batch-size", 120, "--steps", 100, "--lr", 0.1, "--schedule", "constant", "--nproc", 2)
    seen = trained(processes, tmp_path, "run", "rare_class.py:RareClass", *flags)
    assert seen["eval"]["recall"] > 0.8


def code_lines(name: str) -> int:
    """Lines with code on them."""
    lines = (EXAMPLES / name).read_text().partition('"""\n')[2].splitlines()
    return sum(bool(line.strip()) for line in lines)


def test_a_whole_script_as_a_task_loses_nothing_and_is_shorter(processes: Any, tmp_path: Path) -> None:
    assert code_lines("whole_script.py") < 50 < code_lines("whole_script_plain.py")
    plain = str(EXAMPLES / "whole_script_plain.py")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", plain]
    for _ in range(3):  # gloo's threads abort an interpreter at its end now and then
        code, output = processes.run([sys.executable, *words], limit=150, cwd=tmp_path)
        if "(SIGABRT)" not in output:
            break
    assert code == 0, output
    top1, top5 = map(float, re.findall(r"top1 ([\d.]+), top5 ([\d.]+)", output)[-1])
    flags = ("--epochs", 6, "--batch-size", 120, "--micro-batch-size", 30, "--nproc", 2)
    ours = trained(processes, tmp_path, "whole", "whole_script.py:Whole", *flags)
    assert ours["eval"]["top1"] == pytest.approx(top1, abs=0.03) and top1 > 0.7
    assert ours["eval"]["top5"] == pytest.approx(top5, abs=0.02)
