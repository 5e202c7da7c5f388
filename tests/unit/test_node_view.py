"""What a node's agent shows, while its state folder is full for a moment."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.config import Settings
from tandem.config.slices import LaunchConfig
from tandem.launch import view
from tandem.platforms.placement import detect
from tandem.telemetry import health

LIMIT_SECONDS = 20.0
SECOND_OF_TWO = LaunchConfig(nodes=2, node_rank=1, master="127.0.0.1:29500")


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "too long"
        time.sleep(0.01)


def test_health_is_written_again_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(view, "NODE_TICK_SECONDS", 0.01)
    state_dir, tries = tmp_path / "state", []
    written = health.write_health

    def counted(*arguments: object) -> None:
        tries.append(arguments)
        written(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(health, "write_health", counted)
    (state_dir / health.FILE_NAME / "in the way").mkdir(parents=True)
    placement = detect({}, "here", SECOND_OF_TWO)
    with caplog.at_level(logging.WARNING, "tandem"):
        node = view.NodeView(Settings(), placement, state_dir, tmp_path / "scratch", tmp_path / "run")
        try:
            until(lambda: len(tries) > 3)
            (state_dir / health.FILE_NAME / "in the way").rmdir()
            (state_dir / health.FILE_NAME).rmdir()
            until(lambda: health.check(state_dir)[0])
        finally:
            node.close()
    warnings = [record for record in caplog.records if "cannot write health" in record.message]
    assert len(warnings) == 1, "said once, not each second"


def test_the_end_of_a_run_shorter_than_a_tick_is_in_its_health(tmp_path: Path) -> None:
    placement = detect({}, "here", SECOND_OF_TWO)
    node = view.NodeView(Settings(), placement, tmp_path / "state", tmp_path / "scratch", tmp_path / "run")
    node.ended(0, "")
    node.close()
    assert health.check(tmp_path / "state") == (True, "succeeded at step 0")
