"""How far the settings and the loop's object travel: parts are built from what they need, and no more."""

import sys
from pathlib import Path
from typing import Any

import pytest

WALKED = Path(__file__).parents[1] / "walked.py"
OPTIONS = (
    "--steps 12 --batch-size 24 --task.train-samples 240 --eval-every 4 --eval-batch-size 1000 --log-every 2 "
    "--checkpoint-every 4 --replica-check-every 4 --clip-norm 1 --warmup 2 --metrics 0 "
    "--metrics-linger 0"
)


@pytest.mark.soak
@pytest.mark.parametrize(("what", "most_stays", "most_returns"), [("settings", 20, 8), ("loop", 15, 8)])
def test_no_part_is_given_more_than_it_needs(
    what: str, most_stays: int, most_returns: int, processes: Any, tmp_path: Path
) -> None:
    folders = ["--run-dir", str(tmp_path / "run"), "--data-dir", str(tmp_path / "data")]
    code, output = processes.run([sys.executable, str(WALKED), what, *folders, *OPTIONS.split()])
    assert code == 0, output
    *found, counts = output.rstrip().splitlines()
    stays, returns = (int(word.split()[0]) for word in counts.split(", "))
    assert any("rank/task.py: _run" in line or "training/loop.py: train" in line for line in found), output
    assert stays <= most_stays and returns <= most_returns, output
