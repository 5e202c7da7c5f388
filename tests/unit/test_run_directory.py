"""A run directory that is opened: where it is, its part on this machine, and what opening it costs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from patience import patient
from tandem.config import Settings
from tandem.errors import ConfigError, RunTakenError
from tandem.platforms.detection import Placement
from tandem.run.directory import RunDir
from tandem.run.lease import Token, held
from tandem.script.job import Program
from tandem.work.program import job_of

LAPTOP = Placement("none", 1, 0, 1, "localhost", 0)


def test_a_folder_is_its_own_part_on_this_machine(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.is_here and run.folder == run.where == tmp_path / "run"
    assert run.rank_log(3) == tmp_path / "run" / "log" / "rank-3.log"
    assert run.checkpoints.directory == tmp_path / "run" / "checkpoints"
    assert run.summary() == {} and list(run.events()) == [] and run.files().problems == []
    assert not (tmp_path / "run").exists(), "to open it makes nothing"


def test_an_address_has_a_folder_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    run = RunDir(Path("s3:/bucket/runs/a"))  # as pathlib has taken it
    assert not run.is_here and str(run.where) == "s3://bucket/runs/a"
    assert run.folder == tmp_path / f"tandem-runs-{os.getuid()}" / "bucket" / "runs" / "a"
    run.make_private()
    assert not run.folder.exists()
    run.make_folder()
    assert run.folder.is_dir() and run.folder.parents[2].stat().st_mode & 0o777 == 0o700


def test_scripts_with_a_run_at_an_address_log_where_the_agent_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    settings = Settings().replace(run_dir=RunDir("s3://bucket/runs/a").where)
    run = RunDir.of(settings)
    job = job_of(Program("script", "train.py"), run, settings, ())
    assert Path(job.logs) == run.logs and run.logs.is_relative_to(tmp_path)
    assert job.variables["TANDEM_RUN_DIR"] == "s3://bucket/runs/a"


def test_the_default_is_for_laptops_alone_and_what_is_recorded_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = Settings().replace(task="tasks/my.py:Own")
    run = RunDir.open(settings, LAPTOP, 0.0)
    assert run.folder.parent == tmp_path / "runs" and run.folder.name.startswith("Own-")
    recorded = run.recorded(settings)
    assert recorded.run.run_dir == run.where and recorded.data.data_dir == tmp_path / "data"
    assert RunDir.of(recorded).where == run.where
    with pytest.raises(ConfigError, match="no run directory is set, .*TANDEM_RUN_DIR="):
        RunDir.open(settings, Placement("slurm", 2, 0, None, "node1", 20004), 0.0)


def test_launches_of_one_second_have_different_directories() -> None:
    names = [RunDir.open(Settings(), LAPTOP, 1.7e9 + after).folder.name for after in (0.0, 0.25, 0.5)]
    assert len(set(names)) == 3 and names == sorted(names)
    assert len({name.rpartition("-")[0] for name in names}) == 1


def test_only_who_has_a_token_is_checked(tmp_path: Path) -> None:
    with held(tmp_path / "run", LAPTOP) as mine:
        assert mine.token is not None
        RunDir(tmp_path / "run", mine.token).checkpoints.save(1, b"x", {})
        stale = RunDir(tmp_path / "run", Token(mine.token.number, "another word"))
        with pytest.raises(RunTakenError):
            stale.checkpoints.save(2, b"x", {})
        assert RunDir(tmp_path / "run").checkpoints.steps() == [1]


def test_to_open_one_imports_no_torch() -> None:
    code = "import sys, tandem.run.directory; sys.exit(bool({'torch', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(100)).returncode == 0
