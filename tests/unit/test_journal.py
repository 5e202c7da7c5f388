import json
from pathlib import Path

import pytest

from tandem.telemetry.journal import Journal, write_json_atomic


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_and_metrics_are_json_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "run")
    journal.event("restart", reason="crash", path=Path("a"))
    journal.metrics(50, loss=float("nan"))
    expected = {"time": 0, "kind": "restart", "reason": "crash", "path": "a"}
    assert lines(journal.events_path)[0] | {"time": 0} == expected
    assert lines(journal.metrics_path)[0] | {"time": 0} == {"time": 0, "step": 50, "loss": "NaN"}


def test_rewind_drops_later_and_torn_lines(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    assert journal.rewind(1) == 0
    for step in (10, 20, 30):
        journal.metrics(step)
    with journal.metrics_path.open("a") as file:
        file.write('{"step": 2')
    assert journal.rewind(20) == 2
    assert [line["step"] for line in lines(journal.metrics_path)] == [10, 20]
    assert list(tmp_path.iterdir()) == [journal.metrics_path]


def test_a_torn_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.events_path.write_text('{"kind": "sta')
    journal.event("stop")
    assert json.loads(journal.events_path.read_text().splitlines()[1])["kind"] == "stop"


def test_what_cannot_be_written_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    journal = Journal(tmp_path / "file")
    journal.event("a")
    journal.event("b")
    assert journal.failures == 2 and len(caplog.records) == 1


def test_write_json_atomic_replaces_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json_atomic(path, {"a": 1})
    write_json_atomic(path, {"a": float("inf"), "b": (1, {2})})
    assert json.loads(path.read_text()) == {"a": "Infinity", "b": [1, [2]]}
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError):
        write_json_atomic(tmp_path / "none" / "a.json", {})
