"""A run's folder: what is made for it, what a start takes away, and what is left of a run that is none."""

from pathlib import Path

import pytest

from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.launch.run_dir import prepare_run_dir
from tandem.run.directory import RunDir
from tandem.run.lease import Lease


def test_folders_that_nothing_has_come_into_go_again(tmp_path: Path) -> None:
    with RunDir(tmp_path / "runs" / "a").created():
        assert (tmp_path / "runs" / "a").is_dir()
    assert not (tmp_path / "runs").exists() and tmp_path.exists()


def test_those_that_were_there_or_are_filled_stay(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with RunDir(tmp_path / "empty").created():
        pass
    with RunDir(tmp_path / "runs" / "a").created():
        (tmp_path / "runs" / "other").touch()
    with pytest.raises(KeyError), RunDir(tmp_path / "runs" / "b").created():
        (tmp_path / "runs" / "b" / "log").mkdir()
        raise KeyError
    assert (tmp_path / "empty").is_dir() and not (tmp_path / "runs" / "a").exists()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["b", "other"]


@pytest.mark.parametrize(
    ("kind", "saved", "stays"),
    [("fresh", 0, False), ("resume", 9, False), ("complete", 9, True), (None, 3, False), (None, 9, True)],
)
def test_a_start_takes_away_the_summary_of_the_last_one(
    kind: str | None, saved: int, stays: bool, tmp_path: Path
) -> None:
    """One that was stopped before its first step left that of the launch before, as if nothing had been.
    Of a program, which decides by itself, it stays where the newest checkpoint is of the last step."""
    (tmp_path / "summary.json").write_text("{}")
    if saved:
        CheckpointStore(tmp_path / "checkpoints").save(saved, b"state", {"steps_planned": 9})
    decision = ResumeDecision(kind) if kind is not None else None  # type: ignore[arg-type]
    prepare_run_dir(RunDir(tmp_path), Settings().replace(run_dir=tmp_path), Lease(tmp_path), decision)
    assert (tmp_path / "summary.json").exists() == stays and (tmp_path / "config.json").exists()
