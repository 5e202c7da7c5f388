"""Mistakes in a task: each is one line with file and line and ends with 2, before the first step."""

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from program_files import program_text
from tandem.checkpoint.store import CheckpointStore

pytestmark = pytest.mark.timeout(300)  # the runs of all mistakes are one fixture

TASKS = Path(__file__).parents[1] / "fixtures" / "mistaken_tasks.py"
DRIVER = program_text("task_mistakes_driver")
SHORT = ["--batch-size", "8", "--epochs", "1", "--metrics", "0", "--threads", "1"]


def says() -> Mapping[str, tuple[str, ...]]:
    spec = importlib.util.spec_from_file_location("mistaken_tasks", TASKS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.SAYS)


SAYS = says()


class Ended(NamedTuple):
    """How the run of one task ended."""

    code: int
    output: str
    folder: Path


Run = Callable[[Mapping[str, list[str]]], dict[str, Ended]]


@pytest.fixture(scope="module")
def run_all(module_processes: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs of tasks of TASKS, one after the other, each forked from a process that has torch."""

    def run(words: Mapping[str, list[str]]) -> dict[str, Ended]:
        folder = tmp_path_factory.mktemp("mistakes")
        command = [sys.executable, "-c", DRIVER, str(TASKS), str(folder), json.dumps(words)]
        code, output = module_processes.run(command, limit=280, cwd=folder)
        assert code == 0, output
        codes = json.loads(output.splitlines()[-1])
        return {
            name: Ended(codes[name], (folder / f"{name}.txt").read_text(), folder / name) for name in words
        }

    return run


@pytest.fixture(scope="module")
def mistakes(run_all: Run) -> dict[str, Ended]:
    ddp = [*SHORT, "--strategy", "ddp"]
    return run_all({name: ddp if name == "UnusedParameters" else SHORT for name in SAYS})


@pytest.mark.parametrize("name", SAYS)
def test_a_mistake_is_one_line_with_its_place(mistakes: dict[str, Ended], name: str) -> None:
    ended = mistakes[name]
    assert ended.code == 2, ended.output
    assert "Traceback" not in ended.output, ended.output
    lines = [line for line in ended.output.splitlines() if all(part in line for part in SAYS[name])]
    assert len(lines) == 1, ended.output
    assert re.search(r"mistaken_tasks\.py line \d+", lines[0]), lines[0]
    assert "step 1 of" not in ended.output and not CheckpointStore(ended.folder / "checkpoints").steps()


def test_the_line_is_that_of_the_method(mistakes: dict[str, Ended]) -> None:
    lines = TASKS.read_text().splitlines()
    number = int(re.search(r"mistaken_tasks\.py line (\d+)", mistakes["NoModel"].output)[1])  # type: ignore[index]
    assert lines[number - 1].strip() == "def build_model(self):"
    assert lines[number - 2] == "class NoModel(Right):"


@pytest.fixture(scope="module")
def others(run_all: Run) -> dict[str, Ended]:
    return run_all({name: [*SHORT, "--deterministic"] if name == "NoKernel" else SHORT for name in (
        "TextFirst", "NoEvaluation", "LossOfOneElement", "FailsWhileItEvaluates", "NeedsMoreSamples",
        "AnswersInWords", "NoKernel", "FailsBackward",
    )})  # fmt: skip


def test_a_batch_may_begin_with_text(others: dict[str, Ended]) -> None:
    assert others["TextFirst"].code == 0, others["TextFirst"].output


def test_a_loss_may_have_one_dimension_of_one(others: dict[str, Ended]) -> None:
    assert others["LossOfOneElement"].code == 0, others["LossOfOneElement"].output


def test_without_an_evaluation_set_there_is_none_and_that_is_said_once(others: dict[str, Ended]) -> None:
    ended = others["NoEvaluation"]
    assert ended.code == 0, ended.output
    assert ended.output.count("no evaluation") == 1
    summary = json.loads((ended.folder / "summary.json").read_text())
    assert summary["eval"] == {} and summary["global_step"] == 5


def test_an_evaluation_that_fails_does_not_cost_its_epoch(others: dict[str, Ended]) -> None:
    ended = others["FailsWhileItEvaluates"]
    assert ended.code == 1 and "the evaluation of this task is broken" in ended.output
    store = CheckpointStore(ended.folder / "checkpoints")
    assert store.steps() == [5]
    store.verify(5)
    assert store.info(5).get("eval", {}) == {}


def test_a_score_that_needs_more_samples_is_no_mistake(others: dict[str, Ended]) -> None:
    ended = others["NeedsMoreSamples"]
    assert ended.code == 0, ended.output
    assert ended.output.count("a test of evaluate_all failed") == 1, ended.output
    assert json.loads((ended.folder / "summary.json").read_text())["eval"]["score"] == pytest.approx(1 / 38)


def test_the_first_answer_of_after_evaluation_is_checked(others: dict[str, Ended]) -> None:
    """It hears of scores first after an epoch: that is the first call, and its epoch is kept."""
    ended = others["AnswersInWords"]
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    [line] = [line for line in ended.output.splitlines() if "after_evaluation returns" in line]
    assert re.search(r"mistaken_tasks\.py line \d+: after_evaluation returns a str; return True to end", line)
    assert CheckpointStore(ended.folder / "checkpoints").steps() == [5]


def test_an_operation_without_a_deterministic_kernel_is_one_line(others: dict[str, Ended]) -> None:
    ended = others["NoKernel"]
    assert ended.code == 2 and "Traceback" not in ended.output, ended.output
    [line] = [line for line in ended.output.splitlines() if "max_unpool" in line]
    assert "--deterministic" in line and "github.com" not in line


def test_an_error_of_the_backward_pass_is_not_said_to_be_in_the_tasks_code(others: dict[str, Ended]) -> None:
    ended = others["FailsBackward"]
    assert ended.code == 1 and "inplace operation" in ended.output, ended.output
    assert "in the task's code" not in ended.output and "site-packages" not in ended.output, ended.output
    assert "training/step.py line" in ended.output
