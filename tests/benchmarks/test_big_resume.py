"""A state large enough to be read in place: the memory it takes, and that a run goes on from it exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

import big_resume

pytestmark = [pytest.mark.multi, pytest.mark.soak, pytest.mark.timeout(600)]


def ended(folder: Path, steps: int) -> dict[str, Any]:
    with big_resume.launch(folder, 2, 0.3, steps) as run:
        assert run.wait(280) == 0, run.words()
    return dict(json.loads((folder / "summary.json").read_text()))


def test_two_ranks_go_on_from_a_large_state_as_if_they_had_not_stopped(tmp_path: Path) -> None:
    whole = ended(tmp_path / "whole", 3)
    assert ended(tmp_path / "parts", 1)["weights_sha256"] != whole["weights_sha256"]
    assert ended(tmp_path / "parts", 3)["weights_sha256"] == whole["weights_sha256"]


@pytest.mark.soak
def test_its_memory_is_measured(tmp_path: Path) -> None:
    size, most, seconds = big_resume.measured(tmp_path / "run", 1, 0.3)
    assert size > 2.9e8 and most > size and seconds > 0
