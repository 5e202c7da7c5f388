"""An error of a task: where in its own code it came from, in few lines."""

from pathlib import Path
from typing import Any

import pytest
import torch

from program_files import program_text
from tandem.data.loader import train_batches
from tandem.data.sampler import GlobalOrder, TrainBatches
from tandem.tasks.traces import MOST_LINES, full_trace, short_trace, what_and_where

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
    assert "row 7 is broken" in said and said.endswith("my_task.py line 35)"), said
