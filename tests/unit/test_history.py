"""What the page remembers: bounded, read back from the run directory, cut where a world goes on."""

from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.report.history import FULL_POINTS, MAX_EVENTS, MAX_POINTS, History
from tandem.run.directory import RunDir
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import Event, Point, RunStarted


def steps(history: History) -> list[int]:
    points: Any = history.curves()["points"]
    return [point["step"] for point in points]


def checkpoint(run_dir: Path, step: int) -> None:
    CheckpointStore(run_dir / "checkpoints").save(step, bytes(7), {})


def test_a_new_agent_reads_it_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (10, 20):
        journal.metrics(step, loss=1.0)
    journal.event("checkpoint", step=20)
    with journal.metrics_path.open("a") as file:
        file.write('{"step": 30, "lo')
    history = History(RunDir(tmp_path))
    assert steps(history) == [10, 20] and history.last_step == 20
    assert [event["kind"] for event in history.now()["events"]] == ["checkpoint"]  # type: ignore[attr-defined]


def test_points_after_the_step_a_world_begins_at_go(tmp_path: Path) -> None:
    history = History(RunDir(tmp_path))
    for step in (10, 20, 30):
        history.handle(Point(step, 1.0, {}))
    version = history.version
    history.handle(RunStarted(20, 10, 100))
    assert steps(history) == [10, 20] and history.version > version


def test_it_stays_bounded_and_keeps_beginning_and_end(tmp_path: Path) -> None:
    history = History(RunDir(tmp_path))
    for step in range(5 * MAX_POINTS):
        history.handle(Point(step, 1.0, {}))
        history.handle(Event("x", 1.0, {"step": step}))
    shown = steps(history)
    assert len(shown) <= MAX_POINTS and shown[0] == 0
    assert shown[-FULL_POINTS:] == list(range(5 * MAX_POINTS - FULL_POINTS, 5 * MAX_POINTS))
    assert len(history.now()["events"]) == MAX_EVENTS  # type: ignore[arg-type]


def test_checkpoints_are_those_on_the_volume_with_what_is_known_of_them(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / ".tmp-step-400").mkdir()
    (tmp_path / "checkpoints" / "step-000000500").mkdir()  # no manifest: not committed
    history = History(RunDir(tmp_path))
    history.handle(Event("checkpoint", 1.0, {"step": 300, "verified": True}))
    history.handle(Event("fallback", 1.0, {"step": 200}))
    found: Any = history.now()["checkpoints"]
    assert [(each["step"], each["state"], each["bytes"]) for each in found] == [
        (300, "verified", 7),
        (200, "damaged", 7),
        (100, "written", 7),
    ]


def test_checkpoints_stay_on_the_page_until_a_new_list_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each event of a checkpoint emptied the list, for good if the volume then failed."""
    checkpoint(tmp_path, 100)
    history = History(RunDir(tmp_path))
    assert len(history.now()["checkpoints"]) == 1  # type: ignore[arg-type]
    history.handle(Event("checkpoint", 1.0, {"step": 200}))
    monkeypatch.setattr(history, "_look", lambda: None)  # it has not listed them yet
    assert len(history.now()["checkpoints"]) == 1  # type: ignore[arg-type]


def test_the_last_evaluation_s_scores_are_told(tmp_path: Path) -> None:
    history = History(RunDir(tmp_path))
    assert history.now()["scores"] == {}
    history.handle(Point(10, 1.0, {"eval": {"accuracy": 0.5}}))
    history.handle(Point(20, 1.0, {"eval": {"accuracy": 0.75}}))
    history.handle(Point(30, 1.0, {"loss": 1.0}))
    assert history.now()["scores"] == {"accuracy": 0.75}


def test_strange_messages_do_no_harm(tmp_path: Path) -> None:
    history = History(RunDir(tmp_path))
    history.handle(Point("x", 1.0, {}))  # type: ignore[arg-type]
    history.handle(Event("checkpoint", 1.0, {"step": None}))
    assert steps(history) == []
