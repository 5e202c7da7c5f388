"""`tandem check`: passes a sound task, and says of one that is not what is wrong, with file and line."""

import os
import re
from pathlib import Path

import pytest
import torch.distributed as dist
from small_runs import TASK, Runs

from tandem.config import Settings
from tandem.distributed.group import Position
from tandem.errors import ConfigError
from tandem.verify.check import Parts, compared, facts_of_ranks
from tandem.verify.probe import facts_of

pytestmark = pytest.mark.timeout(900)

MISTAKES = '''
import os, time
import numpy
import torch
from torch import nn
from torch.utils.data import Dataset
from tandem.data.datasets import Datasets, TensorRows

ROWS = TensorRows(torch.ones(480, 4), torch.ones(480, 1))


class Right:
    def build_model(self):
        return nn.Linear(4, 1)

    def build_datasets(self):
        return Datasets(ROWS, ROWS)

    def loss(self, model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])


class Entropic(Dataset):
    def __len__(self):
        return 480

    def __getitem__(self, index):
        return torch.full((4,), float(os.urandom(1)[0])), torch.ones(1)


class SamplesOfEntropy(Right):
    def build_datasets(self):
        return Datasets(Entropic(), ROWS)


class WeightsOfTime(Right):
    def build_model(self):
        model = nn.Linear(4, 1)
        model.bias.data.fill_(time.time_ns() % 1_000_003)
        return model


class LossThatCounts(Right):
    calls = 0

    def loss(self, model, batch):
        self.calls += 1
        return nn.functional.mse_loss(model(batch[0]), batch[1]) * self.calls


class UnseededRows(Right):
    def build_datasets(self):
        x = torch.from_numpy(numpy.random.rand(480, 4)).float()
        return Datasets(TensorRows(x, torch.ones(480, 1)), ROWS)


class Lambda(Right):
    def build_datasets(self):
        rows = TensorRows(torch.ones(480, 4), torch.ones(480, 1))
        rows.transform = lambda sample: sample
        return Datasets(rows, ROWS)
'''


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
    facts = facts_of(Settings().replace(task=f"{tasks}:{name}"), Position())
    return [f"{each.level} {each.place}{each.text}" for each in compared([facts, facts])]


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


@pytest.mark.slow
def test_data_that_differ_between_ranks_are_named_by_line(tasks: Path, tmp_path: Path) -> None:
    settings = Settings().replace(task=f"{tasks}:UnseededRows")
    (found,) = compared(facts_of_ranks(settings, os.environ, tmp_path))
    assert found.level == "wrong" and f"line {line('build_datasets', 'UnseededRows')}: " in found.place
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
    parts = Parts(iter([100.0, 106.0]).__next__)
    assert [str(parts.next(what)) for what in "abcd"] == [
        "  1 of 4 a",
        "  2 of 4 b; about 30 s to go",
        "  3 of 4 c; about 20 s to go",
        "  4 of 4 d; about 10 s to go",
    ]


def test_a_file_that_is_not_there_is_named(runs: Runs) -> None:
    with pytest.raises(ConfigError, match=re.escape("nowhere.py does not exist")):
        facts_of(Settings().replace(task="nowhere.py"), Position())
    assert not dist.is_initialized()
