"""`tandem check`: passes a sound task, and says of one that is not what is wrong, with file and line."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from small_runs import TASK, Runs

from program_files import program_text
from tandem.config import Settings
from tandem.distributed.position import Connection, Position
from tandem.errors import ConfigError
from tandem.verify.check import TaskParts, compared, facts_of_ranks
from tandem.verify.probe import facts_of

pytestmark = pytest.mark.timeout(900)

MISTAKES = program_text("check_mistakes")


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "mistakes.py"
    path.write_text(MISTAKES)
    return path


def line(name: str, within: str = "") -> int:
    """Of `def name` in class `within`."""
    begin = MISTAKES.index(f"class {within}") if within else 0
    return MISTAKES[: MISTAKES.index(f"def {name}", begin)].count("\n") + 1


def told(tasks: Path, name: str) -> list[str]:
    facts = facts_of(Settings().replace(task=f"{tasks}:{name}"), Position(), Connection())
    return [f"{each.level} {each.location}{each.text}" for each in compared([facts, facts])]


@pytest.mark.parametrize(
    ("name", "what", "method", "within"),
    [
        ("SamplesOfEntropy", "samples", "__getitem__", "Entropic"),
        ("WeightsOfTime", "first weights", "build_model", "WeightsOfTime"),
        ("LossThatCounts", "loss and gradients", "loss", "LossThatCounts"),
    ],
)
def test_what_differs_from_call_to_call_is_named_by_line(
    name: str, what: str, method: str, within: str, tasks: Path
) -> None:
    (found,) = told(tasks, name)
    place = f"mistakes.py line {line(method, within)}"
    assert found.startswith("wrong ") and f"{place}: {what}: two calls" in found


def test_a_sound_task_and_one_with_a_part_that_cannot_be_pickled(tasks: Path) -> None:
    sound = "ok the same at every call and on every rank: samples, first weights, loss and gradients"
    assert told(tasks, "Right") == [sound]
    same, note = told(tasks, "Lambda")
    assert same == sound and note.startswith("note ")
    place = f"line {line('build_datasets', 'Lambda')}"
    assert f"{place}: the training set, a TensorRows, cannot be pickled" in note


def test_data_that_differ_between_ranks_are_named_by_line(tasks: Path, tmp_path: Path) -> None:
    # More than a pipe holds: the ranks wait for each other, and nobody may wait for one of them alone.
    tasks.write_text(f"{MISTAKES}\nprint('.' * 200_000)\n")
    settings = Settings().replace(task=f"{tasks}:UnseededRows")
    (found,) = compared(facts_of_ranks(settings, os.environ, tmp_path))
    assert found.level == "wrong" and f"line {line('build_datasets', 'UnseededRows')}: " in found.location
    assert re.match(r"samples: different on each rank \([0-9a-f]{12}, [0-9a-f]{12}\)", found.text)


def check(runs: Runs, *flags: object) -> tuple[int, str]:
    command = runs.command("check", "unused", *flags, delay=0.01)
    code, output = runs.processes.wait(
        runs.processes.start(command, cwd=runs.folder, env=runs.environment), limit=400
    )
    return int(code), str(output)


@pytest.mark.soak
def test_a_sound_task_passes(runs: Runs) -> None:
    code, output = check(runs)
    lines = output.splitlines()
    assert code == 0 and lines[-1] == "verdict: sound", output
    told = [each.split()[0] for each in lines[1:-1] if each.split()[0] != "..."]
    assert told == ["1", "ok", "2", "ok", "3", "ok", "4", "ok"], output
    assert not (runs.folder / "unused").exists(), "everything happens elsewhere"


@pytest.mark.soak
def test_a_state_that_no_checkpoint_holds_is_found(runs: Runs) -> None:
    counting = TASK.replace(
        "        out = model(x)",
        "        self.calls = getattr(self, 'calls', 0) + 1\n        out = model(x) * (1 + self.calls / 100)",
    )
    (runs.folder / "small.py").write_text(counting)
    code, output = check(runs)
    assert code == 1 and output.splitlines()[-1].startswith("verdict: "), output
    assert "  wrong  small.py line " in output and "loss" in output


def test_a_task_that_cannot_train_is_one_line_with_its_code(runs: Runs) -> None:
    (runs.folder / "small.py").write_text(TASK.replace("return Datasets(rows,", "return (rows,"))
    code, output = check(runs)
    assert code == 2 and "build_datasets returns a tuple of 2" in output and "Traceback" not in output, output
    begin = output.splitlines()[:2]
    assert begin[0].startswith("check: small.py:Small, 2 ranks on CPUs: ") and "half a minute" in begin[0]
    assert begin[1] == "  1 of 4 a run of 20 steps on 2 ranks"


def test_each_part_is_said_when_it_begins_with_the_time_that_is_left() -> None:
    parts = TaskParts(iter([100.0, 106.0]).__next__)
    assert [str(parts.next(what)) for what in "abcd"] == [
        "  1 of 4 a",
        "  2 of 4 b; about 30 s to go",
        "  3 of 4 c; about 20 s to go",
        "  4 of 4 d; about 10 s to go",
    ]


def test_a_file_that_is_not_there_is_named(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=re.escape("nowhere.py does not exist")):
        facts_of(Settings().replace(task="nowhere.py"), Position(), Connection())
    assert not dist.is_initialized()
