"""The table at the end of a run: what a person wants to know, in words."""

from pathlib import Path
from typing import Any

import pytest

from tandem.telemetry.meter import Interval
from tandem.training.summary import ending_table

SUMMARY: dict[str, Any] = {
    "state": "finished",
    "world_size": 2, "nodes": 2, "epoch": 2, "global_step": 1500, "samples_seen": 360_000, "loss": 0.02,
    "eval": {"accuracy": 0.995, "loss": 0.0235}, "samples_per_second": 21132.4, "wall_seconds": 20.0,
    "restarts": 1, "planned_stops": 0,
    "resumed_from_step": 1250, "last_checkpoint_step": 1500, "ended_early": False,
}  # fmt: skip


def test_a_run_that_was_resumed_and_restarted() -> None:
    assert ending_table(
        SUMMARY, Interval(9, 90, {"forward": 4.0, "backward": 12.0}), Path("runs/digits")
    ) == {
        "steps": "1,500, epoch 2; resumed from step 1,250",
        "samples": "360,000 in total, 21,132 a second since step 1,250",
        "loss": "0.0200 (training)",
        "accuracy": "0.9950 (evaluation)",
        "time": "20 s since step 1,250, 16 s of it in steps",
        "a step": "forward 25%, backward 75%",
        "ranks": "2 on 2 nodes, restarts: 1",
        "checkpoint": "step 1,500 in runs/digits/checkpoints",
    }


def test_a_run_that_was_stopped_says_how_to_go_on() -> None:
    table = ending_table(SUMMARY | {"state": "stopped"}, Interval(), Path("runs/digits"))
    again = "to resume: the same command with --run-dir runs/digits"
    assert table["checkpoint"] == f"step 1,500 in runs/digits/checkpoints; {again}"


def test_a_run_that_did_nothing() -> None:
    nothing = SUMMARY | {"nodes": 1, "eval": {}, "resumed_from_step": None, "last_checkpoint_step": None}
    table = ending_table(nothing, Interval(), Path("runs/digits"))
    assert table["ranks"] == "2 on 1 node, restarts: 1"
    assert (table["a step"], table["checkpoint"]) == ("none taken", "none saved")
    assert table["steps"] == "1,500, epoch 2" and "accuracy" not in table
    assert table["loss"] == "none: no steps were taken" and table["time"] == "20 s, 0 s of it in steps"


def test_the_checkpoint_is_where_a_person_types_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for place, said in ((tmp_path / "runs" / "a", "runs/a"), (tmp_path.parent, str(tmp_path.parent))):
        assert ending_table(SUMMARY, Interval(), place)["checkpoint"] == f"step 1,500 in {said}/checkpoints"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert str(tmp_path) in ending_table(SUMMARY, Interval(), tmp_path)["checkpoint"]
