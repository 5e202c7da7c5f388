"""`tandem runs`: what is in a folder of runs, and what may go."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from program_files import program_text
from tandem.checkpoint.store import CheckpointStore
from tandem.cli import run
from tandem.errors import ConfigError
from tandem.report.runs import SETTLED_SECONDS, clean, find_runs, table

AGO = SETTLED_SECONDS + 60
OWNER = program_text("list_of_runs_owner")


def make(folder: Path, state: str | None, saved: bool, age: float = 0.0, **more: str) -> Path:
    """A run whose files are `age` seconds old."""
    (folder / "log").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"task": "digits", "run_dir": str(folder)}))
    (folder / "log" / "rank-0.log").write_text("a line\n")
    if state is not None:
        summary = {"state": state, "global_step": 12, "eval": {"accuracy": 0.5, "loss": 0.25}}
        (folder / "summary.json").write_text(json.dumps(summary))
    if saved:
        CheckpointStore(folder / "checkpoints").save(10, b"state", {})
    for name, text in more.items():
        (folder / name).write_text(text)
    for path in folder.rglob("*"):
        os.utime(path, (time.time() - age, time.time() - age))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make(tmp_path / "good", "finished", saved=True, age=2 * 3600)
    make(tmp_path / "broken", "failed", saved=False, age=30)
    make(tmp_path / "killed", None, saved=False, age=AGO)
    make(tmp_path / "training", None, saved=True)
    (tmp_path / "notes").mkdir()
    return tmp_path


def test_runs_are_listed_newest_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("runs", [str(folder)], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "state", "step", "saved", "scores", "last", "update", "MB"]
    assert [line.split()[0] for line in lines[1:5]] == ["training", "broken", "killed", "good"]
    assert lines[4].split() == "good finished 12 10 accuracy 0.5, loss 0.25 2 h ago 0.0".split()
    assert lines[1].split()[:4] == ["training", "open", "10", "10"]
    assert lines[3].split()[:3] == ["killed", "not", "begun"]
    assert lines[5].startswith("open: killed, or running on another machine")


def test_a_clock_that_is_ahead_removes_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has just started on another machine looked as if it had been silent for hours."""
    make(tmp_path / "runs" / "new", None, saved=False)
    make(tmp_path / "runs" / "old", None, saved=False, age=AGO)
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + 2 * AGO)
    assert run("runs", [str(tmp_path / "runs"), "--clean"], {}) == 0
    assert os.listdir(tmp_path / "runs") == ["new"]


def test_a_run_whose_launch_is_seen_is_running(tmp_path: Path) -> None:
    run_dir = make(tmp_path / "here", None, saved=True)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(run_dir)], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"mine\n"
        assert find_runs(tmp_path)[0].state == "running"
    finally:
        owner.kill()
        owner.communicate()
    assert find_runs(tmp_path)[0].state == "open"


def test_one_run_is_listed_alone(folder: Path) -> None:
    assert [row.path.name for row in find_runs(folder / "good")] == ["good"]


def test_no_runs_and_no_folder(tmp_path: Path) -> None:
    assert table(find_runs(tmp_path), tmp_path) == f"no runs in {tmp_path}"
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        run("runs", [str(tmp_path / "nowhere")], {})


def test_what_left_nothing_goes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("runs", [str(folder), "--dry-run"], {})
    said = capsys.readouterr().out
    assert f"would remove {folder / 'broken'}: failed, no checkpoint" in said
    assert (folder / "broken").exists()
    run("runs", [str(folder), "--clean"], {})
    assert sorted(path.name for path in folder.iterdir()) == ["good", "notes", "training"]
    assert "broken" not in capsys.readouterr().out.splitlines()[-1]


def test_what_may_still_be_of_use_stays(tmp_path: Path) -> None:
    """A run that may train; one with a file of somebody else's; what was damaged or set aside; a bucket's."""
    make(tmp_path / "starting", None, saved=False)
    make(tmp_path / "script", "failed", saved=False, **{"weights.bin": "mine"})
    damaged = make(tmp_path / "damaged", "failed", saved=True)
    (damaged / "checkpoints" / "step-000000010" / "manifest.json").unlink()
    make(tmp_path / "aside", "failed", saved=True).joinpath("checkpoints").rename(
        tmp_path / "aside" / "checkpoints-before-20260101T000000Z"
    )
    remote = make(tmp_path / "remote", "failed", saved=False)
    (remote / "config.json").write_text(json.dumps({"run_dir": "s3://bucket/run"}))
    make(tmp_path / "finished", "finished", saved=False)
    (tmp_path / "link").symlink_to(make(tmp_path / "elsewhere" / "run", "failed", saved=False))
    rows = find_runs(tmp_path)
    assert len(rows) == 6 and clean(rows) == []


def test_a_score_that_is_not_finite_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "bad", None, saved=False)
    summary = '{"state": "finished", "global_step": 60, "eval": {"recall": "NaN", "loss": "Infinity"}}'
    (tmp_path / "bad" / "summary.json").write_text(summary)
    assert run("runs", [str(tmp_path)], {}) == 0
    assert "loss inf, recall nan" in capsys.readouterr().out
    assert run("runs", [str(tmp_path), "--clean"], {}) == 0


def test_one_broken_run_is_a_line_and_the_others_are_listed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "killed" / "summary.json").symlink_to(folder / "good" / "summary.json")
    (folder / "broken" / "summary.json").write_text('{"state": "fail')
    assert run("runs", [str(folder)], {}) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if line.startswith(("good ", "training "))]) == 2
    assert [line for line in lines if line.startswith("killed: ")] == ["killed: summary.json is a link"]
    assert any(line.startswith("broken: summary.json") for line in lines)


@pytest.mark.parametrize(
    "theirs",
    [
        "log/notes.txt",
        "log/plots/a.png",
        "log/rank-0.log.gz",
        "tensorboard/mine.csv",
        "profile/mine.json",
        "wandb/x.py",
    ],
)
def test_a_file_of_a_person_in_one_of_our_folders_stays(tmp_path: Path, theirs: str) -> None:
    """`--clean` took log/, tensorboard/, profile/ and wandb/ for its own, whatever was in them."""
    made = make(tmp_path / "broken", "failed", saved=False)
    (made / theirs).parent.mkdir(exist_ok=True, parents=True)
    (made / theirs).write_text("mine")
    assert clean(find_runs(tmp_path)) == [] and (made / theirs).read_text() == "mine"


def test_a_link_in_one_of_our_folders_stays(tmp_path: Path) -> None:
    made = make(tmp_path / "broken", "failed", saved=False)
    (tmp_path / "elsewhere").write_text("mine")
    (made / "log" / "node-1.log").symlink_to(tmp_path / "elsewhere")
    assert clean(find_runs(tmp_path)) == []


def test_all_that_we_write_about_a_run_goes(tmp_path: Path) -> None:
    names = ["log/node-0.log.1", "log/tracker.log", "log/flight-rank-0.json", "log/stacks-rank-1.txt"]
    names += ["log/ended-0a1b.json", "tensorboard/events.out.tfevents.17.host.1.0", "profile/rank-0.json"]
    made = make(tmp_path / "broken", "failed", saved=False, **{"report.html": "x", "events.jsonl.1": ""})
    (made / "wandb" / "run-20260101_000000-ab" / "files").mkdir(parents=True)
    (made / "wandb" / "latest-run").symlink_to("run-20260101_000000-ab")
    for name in names:
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).touch()
    assert [row.path for row in clean(find_runs(tmp_path))] == [made] and not made.exists()
