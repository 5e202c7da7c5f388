"""A run's folder: what is made for it, what a start takes away, and what is left of a run that is none."""

from pathlib import Path

import pytest

from tandem.checkpoint.claim import Claim
from tandem.checkpoint.decision import ResumeDecision
from tandem.config import Settings
from tandem.launch.run_dir import prepare_run_dir, run_folder


def test_folders_that_nothing_has_come_into_go_again(tmp_path: Path) -> None:
    with run_folder(Settings().replace(run_dir=tmp_path / "runs" / "a")):
        assert (tmp_path / "runs" / "a").is_dir()
    assert not (tmp_path / "runs").exists() and tmp_path.exists()


def test_those_that_were_there_or_are_filled_stay(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with run_folder(Settings().replace(run_dir=tmp_path / "empty")):
        pass
    with run_folder(Settings().replace(run_dir=tmp_path / "runs" / "a")):
        (tmp_path / "runs" / "other").touch()
    with pytest.raises(KeyError), run_folder(Settings().replace(run_dir=tmp_path / "runs" / "b")):
        (tmp_path / "runs" / "b" / "log").mkdir()
        raise KeyError
    assert (tmp_path / "empty").is_dir() and not (tmp_path / "runs" / "a").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["b", "other"]


@pytest.mark.parametrize(("kind", "stays"), [("fresh", False), ("resume", False), ("complete", True)])
def test_a_start_takes_away_the_summary_of_the_last_one(kind: str, stays: bool, tmp_path: Path) -> None:
    """One that was stopped before its first step left that of the launch before, as if nothing had been."""
    (tmp_path / "summary.json").write_text("{}")
    decision = ResumeDecision(kind)  # type: ignore[arg-type]
    prepare_run_dir(Settings().replace(run_dir=tmp_path), Claim(tmp_path), decision)
    assert (tmp_path / "summary.json").exists() == stays and (tmp_path / "config.json").exists()
