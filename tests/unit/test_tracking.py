"""What is sent to a tracker and what is not; the trackers themselves are in tests/faults/test_trackers.py."""

import json
import logging
import os
import queue
import shutil
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from tandem.checkpoint.decision import ResumeDecision
from tandem.cli import run
from tandem.config import Given, Settings, resolve
from tandem.errors import ConfigError
from tandem.launch.run_dir import prepare_run_dir
from tandem.report import tracking
from tandem.report.tracking import MetricRow, RunStart, numbers_of
from tandem.run.directory import RunDir
from tandem.run.lease import Lease
from tandem.telemetry.journal import Journal


class Kept:
    """A tracker in memory, which is away as long as `away`."""

    def __init__(self) -> None:
        self.rows_there: list[MetricRow] = []
        self.began: list[RunStart] = []
        self.states: list[str] = []
        self.away, self.id = False, "there"

    def begin(self, name: str, beginning: RunStart) -> "Kept":
        self.rows([])
        self.began.append(beginning)
        return self

    def rows(self, rows: Sequence[MetricRow]) -> None:
        if self.away:
            raise ConnectionError("nobody is at http://me:hunter22@there")
        self.rows_there += rows

    def end(self, state: str, summary: Mapping[str, object]) -> None:
        self.rows([])
        self.states.append(state)

    def steps(self) -> list[int]:
        return [row.step for row in self.rows_there]


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kept:
    there = Kept()
    monkeypatch.setattr(tracking, "open_tracker", there.begin)
    (tmp_path / "config.json").write_text('{"epochs": 3, "precision": null}')
    return there


def sending(folder: Path) -> tracking.TrackerUpload:
    return tracking.TrackerUpload(RunDir(folder), "mlflow", [])


def test_each_step_is_sent_once_through_rewinds_and_launches(kept: Kept, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    first = sending(tmp_path)
    for step in (10, 20, 30):
        journal.metrics(step, loss=1.0)
    assert first.send() == 3 and first.send() == 0
    journal.rewind(10)  # a rank was killed, and did 20 and 30 again
    for step in (20, 30):
        journal.metrics(step, loss=2.0)
    assert first.send() == 0
    journal.metrics(30, eval={"accuracy": 0.5})
    assert first.send() == 1
    journal.rewind(20)
    journal.metrics(30, loss=3.0)
    second = sending(tmp_path)  # the next launch
    assert second.send() == 0
    journal.metrics(30, eval={"accuracy": 0.6})
    journal.metrics(40, loss=0.5)
    assert second.send() == 1
    assert kept.steps() == [10, 20, 30, 30, 40]
    assert [row.number for row in kept.rows_there] == [0, 1, 2, 3, 4]
    assert [each.known for each in kept.began] == [None, "there"]


def test_what_a_tracker_did_not_take_is_sent_later(kept: Kept, tmp_path: Path) -> None:
    journal, ours = Journal(tmp_path), sending(tmp_path)
    journal.metrics(10, loss=1.0)
    ours.send()
    kept.away = True
    journal.metrics(20, loss=1.0)
    with pytest.raises(ConnectionError):
        ours.send()
    journal.metrics(30, loss=1.0)
    kept.away = False
    assert ours.send() == 2
    kept.away = True
    journal.metrics(40, loss=1.0)
    with pytest.raises(ConnectionError):
        ours.send()
    kept.away = False
    assert sending(tmp_path).send() == 1
    assert kept.steps() == [10, 20, 30, 40]


def test_a_tracker_that_is_away_is_one_warning(
    kept: Kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = queue.Queue[logging.LogRecord]()
    monkeypatch.setattr(tracking.log, "handlers", [QueueHandler(said)])
    tracking.log.setLevel(logging.INFO)
    kept.away = True
    Journal(tmp_path).metrics(10, loss=1.0)
    pauses: list[float] = []

    def until(seconds: float) -> str | None:
        pauses.append(seconds)
        kept.away = len(pauses) < 5
        return "finished" if len(pauses) == 6 else None

    assert tracking.follow(sending(tmp_path), "mlflow", until)
    assert pauses == [0.0, 2.0, 4.0, 8.0, 16.0, 2.0]
    assert kept.steps() == [10] and kept.states == ["finished"]
    away, back = [said.get_nowait().getMessage() for _ in range(said.qsize())]
    assert away.startswith("mlflow does not accept rows (nobody is at http://[hidden]@there)")
    assert back == "mlflow is back; sent 1 rows that had been kept"


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_copy_is_a_run_of_its_own_at_the_tracker(kept: Kept, tmp_path: Path, is_launched: bool) -> None:
    """Its rows went to the run of the original, between that run's own."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"run_dir": str(run)}))
    Journal(run).metrics(10, loss=1.0)
    assert sending(run).send() == 1
    shutil.copytree(run, copy)
    if is_launched:
        prepare_run_dir(RunDir(copy), Settings().replace(run_dir=copy), Lease(copy), ResumeDecision("resume"))
    Journal(copy).metrics(20, loss=2.0)
    assert sending(copy).send() == 2 and sending(copy).send() == 0
    first, second = [each.ours for each in kept.began][:2]
    assert first != second and [each.known for each in kept.began] == [None, None, "there"]


def test_a_run_that_has_moved_keeps_its_run_at_the_tracker(kept: Kept, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    run.mkdir()
    (run / "config.json").write_text(json.dumps({"run_dir": str(run)}))
    Journal(run).metrics(10, loss=1.0)
    assert sending(run).send() == 1
    run.rename(moved)
    assert sending(moved).send() == 0 and kept.began[1].known == "there"


def test_a_torn_line_is_read_when_it_is_whole(kept: Kept, tmp_path: Path) -> None:
    path, ours = tmp_path / "metrics.jsonl", sending(tmp_path)
    path.write_bytes(b'{"step": 1, "loss": 1.0}\n{"step": 2, "lo')
    assert ours.send() == 1
    with path.open("ab") as file:
        file.write(b'ss": 0.5}\n{"torn\n{"step": 3}\n')
    assert ours.send() == 2
    assert kept.steps() == [1, 2, 3]
    mark = json.loads((tmp_path / "tracker.json").read_text())["mlflow"]
    assert mark == {"ours": kept.began[0].ours, "run": "there", "step": 3, "rows": 1, "sent": 3}


def test_a_run_has_one_name_before_its_tracker_has_answered(kept: Kept, tmp_path: Path) -> None:
    kept.away = True
    for _ in range(2):  # two launches
        with pytest.raises(ConnectionError):
            sending(tmp_path).send()
    ours = json.loads((tmp_path / "tracker.json").read_text())["mlflow"]["ours"]
    kept.away = False
    sending(tmp_path).send()
    assert [each.ours for each in kept.began] == [ours]


@pytest.mark.parametrize("found", ["[1]", '{"ours": "a", "of a later version": 1}', '"text"', "null"])
def test_a_mark_that_is_none_is_begun_anew(kept: Kept, tmp_path: Path, found: str) -> None:
    (tmp_path / "tracker.json").write_text(f'{{"mlflow": {found}}}')
    Journal(tmp_path).metrics(10, loss=1.0)
    assert sending(tmp_path).send() == 1 and sending(tmp_path).send() == 0


def test_numbers_have_the_names_of_tensorboard() -> None:
    line = {"time": 1.0, "step": 5, "epoch": 0.5, "loss": "NaN", "scores": {"top5": 0.9}}
    found = numbers_of({**line, "phases": {"data": 0.1}})
    assert str(found.pop("train/loss")) == "nan"
    assert found == {"epoch": 0.5, "train/top5": 0.9, "phases/data": 0.1}
    assert numbers_of({"step": 5, "eval": {"loss": 0.25}}) == {"eval/loss": 0.25}


def test_one_sender_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"tracker": null}')
    with pytest.raises(ConfigError, match="this run has no tracker; use --tracker mlflow"):
        run("track", [str(tmp_path)], {})
    refused = pytest.raises(ConfigError, match="wait until it has ended")
    with tracking.exclusive_sender(tmp_path, wait=True), refused:
        with tracking.exclusive_sender(tmp_path, wait=False):
            pass
    with tracking.exclusive_sender(tmp_path, wait=False):
        pass


def test_track_wants_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run: it has no config.json"):
        run("track", [str(tmp_path)], {})


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_missing_package_is_one_line_before_anything_starts(name: str, tmp_path: Path) -> None:
    if find_spec(name) is not None:
        pytest.skip(f"{name} is installed here")
    settings = resolve({"tracker": Given(name, "flag --tracker", "--tracker")}, {}).settings
    settings = settings.replace(run_dir=tmp_path / "run")
    typed = rf"run: pip install 'tandem-train\[{name}\]', or omit --tracker"
    with pytest.raises(ConfigError, match=typed):
        prepare_run_dir(RunDir.of(settings), settings, Lease(tmp_path / "run"), ResumeDecision("fresh"))
    assert not (tmp_path / "run").exists()


def test_a_journal_that_is_longer_again_than_before_its_cut_is_read_from_its_start(tmp_path: Path) -> None:
    journal, reader = Journal(tmp_path), tracking.JournalReader(tmp_path / "metrics.jsonl")
    assert list(reader.read()) == []
    for step in (10, 20, 30):
        journal.metrics(step)
    assert [at for at, _ in reader.read()] == [(10, 1), (20, 1), (30, 1)]
    journal.rewind(10)
    for step in (20, 30, 40, 50):
        journal.metrics(step, again=True)
    assert [at for at, _ in reader.read()] == [(10, 1), (20, 1), (30, 1), (40, 1), (50, 1)]
    assert list(reader.read()) == []


def test_rows_that_are_none_are_left_out_and_links_are_not_read(kept: Kept, tmp_path: Path) -> None:
    rows: list[object] = [{"step": 1, "loss": "low", "more": 2.0}, {"step": 2, "eval": [1]}]
    rows += [{"step": "3"}, {"step": 4, "eval": None}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert sending(tmp_path).send() == 3 and kept.steps() == [1, 2, 4]
    assert [row.numbers for row in kept.rows_there] == [{"train/more": 2.0}, {}, {}]
    (tmp_path / "outside.jsonl").write_text('{"step": 9, "canary": 1.0}\n')
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "outside.jsonl")
    assert sending(tmp_path).send() == 0


@pytest.mark.timeout(30)
def test_a_line_without_an_end_is_not_read_whole(kept: Kept, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    os.truncate(tmp_path / "metrics.jsonl", 1 << 40)
    assert sending(tmp_path).send() == 0
