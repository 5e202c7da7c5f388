"""The window of `--profile`, also when the run ends or stops inside it."""

import json
from pathlib import Path

from tandem.training.flops import profiled


def test_a_window_that_reaches_the_last_step_is_written(tmp_path: Path) -> None:
    """The loop asks for no batch after the last one, so nothing was written."""
    path = tmp_path / "trace" / "rank-0.json"
    batches = profiled(iter(range(4)), "2:2", 0, path)
    assert [next(batches) for _ in range(4)] == [0, 1, 2, 3] and not path.exists()
    batches.close()
    assert json.loads(path.read_text())["traceEvents"]


def test_a_window_inside_the_run_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    batches = profiled(iter(range(4)), "1:1", 0, path)
    assert [next(batches) for _ in range(3)] == [0, 1, 2] and path.exists()
    path.unlink()
    batches.close()
    assert not path.exists()
