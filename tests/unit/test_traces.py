"""An error of a task: where in its own code it came from, in few lines."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from program_files import program_text
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.errors import ConfigError
from tandem.tasks.traces import MOST_LINES, full_trace, script_trace, short_trace, what_and_where

TASK = program_text("traces_task")


@pytest.fixture
def task(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "my_task.py"
    file.write_text(TASK)
    made: dict[str, Any] = {"__name__": "my_task"}
    exec(compile(TASK, str(file), "exec"), made)
    return made


@pytest.mark.parametrize(
    "name, says, line",
    [("shapes", "shapes", 12), ("dtypes", "dtype", 16), ("deep", "shapes", 12), ("unspeakable", "<", 24)],
)
def test_an_error_has_the_line_of_the_task(task: dict[str, Any], name: str, says: str, line: int) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        task[name]()
    said = what_and_where(caught.value)
    assert said.endswith(f"my_task.py line {line})") and says in said and "\n" not in said
    assert len(short_trace(caught.value).splitlines()) <= MOST_LINES
    assert "site-packages" not in short_trace(caught.value) and "my_task.py" in full_trace(caught.value)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_class_that_cannot_be_sent_comes_from_a_loader_process(
    task: dict[str, Any], workers: int
) -> None:
    sampler = TrainBatches(GlobalOrder(8, 8, 0), 0, 1, 8, 0, 1)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        list(train_batches(task["Broken"](), sampler, seed=0, workers=workers, device=torch.device("cpu")))
    said = what_and_where(caught.value)
    assert "row 7 is broken in sample " in said and said.endswith("my_task.py line 35)"), said


class Rows(torch.utils.data.Dataset[Any]):
    """64 rows; `rows` replaces some of them, and an exception is raised."""

    def __init__(self, rows: dict[int, Any], lists: bool = False) -> None:
        self.rows = rows
        if lists:
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        row = self.rows.get(index, (torch.ones(2), 1))
        if isinstance(row, Exception):
            raise row
        return row


def error_of(rows: dict[int, Any], workers: int = 0, lists: bool = False, **more: Any) -> Exception:
    sampler = TrainBatches(GlobalOrder(64, 32, 0), 0, 1, 32, 0, 2)
    with pytest.raises(Exception) as caught:  # noqa: PT011
        list(train_batches(Rows(rows, lists), sampler, seed=0, workers=workers, device=CPU, **more))
    return caught.value


CPU = torch.device("cpu")


@pytest.mark.timeout(100)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_dataset_names_its_sample(workers: int) -> None:
    error = error_of({41: ValueError("no image")}, workers)
    assert what_and_where(error).startswith("ValueError: no image in sample 41 (")
    *_, last, note = script_trace(error).splitlines()
    assert (last, note) == ("ValueError: no image", "in sample 41") or workers == 1
    assert "in sample 41" in full_trace(error)


def test_an_error_of_many_samples_names_them() -> None:
    said = what_and_where(error_of({41: ValueError()}, lists=True))
    assert re.search(r"in samples \d+(, \d+){7} and 24 more", said), said

    def collate(samples: list[Any]) -> Any:
        raise KeyError("label")

    assert "in samples " in what_and_where(error_of({}, collate=collate))


@pytest.mark.timeout(100)
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("row, named", [
    (None, ["sample 41 is None", "shape [2]"]),
    ((torch.ones(3), 1), ["sample 41 is", "shape [3]", "shape [2]"]),
    ((torch.ones(2),), ["sample 41 is", "collate"]),
], ids=["none", "shape", "length"])  # fmt: skip
def test_samples_that_differ_are_a_mistake_with_their_numbers(
    row: Any, named: list[str], workers: int
) -> None:
    error = error_of({41: row}, workers)
    assert isinstance(error, ConfigError) and all(each in str(error) for each in named), error
    assert "\n" not in str(error)


def test_samples_that_cannot_be_collated_are_a_mistake() -> None:
    error = error_of({index: (object(), 1) for index in range(64)})
    assert isinstance(error, ConfigError) and "object" in str(error) and "__getitem__" in str(error)


def test_a_script_trace_ends_with_the_error_and_not_with_foreign_notes() -> None:
    error = ValueError("what")
    error.add_note("a note\nof two lines")
    assert script_trace(error).splitlines()[-1] == "ValueError: what"
