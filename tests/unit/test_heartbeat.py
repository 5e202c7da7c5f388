"""The thread that speaks for a rank: it goes on, whatever happens to it."""

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from tandem.telemetry import heartbeat
from tandem.telemetry.clock import Clock
from tandem.telemetry.hangs import HangLimits
from tandem.telemetry.heartbeat import ClockLocator

LIMIT_SECONDS = 60.0


def test_signs_of_life_go_on_after_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception ended the thread, and every phase longer than a hang's time was a false alarm."""
    caplog.set_level(logging.ERROR, "tandem.heartbeat")
    heard, thrice = [], threading.Event()

    def send(message: Any) -> None:
        heard.append(message)
        if len(heard) <= 2:
            raise RuntimeError("the recorder takes no such argument")
        thrice.set()

    locator = ClockLocator(Clock(), tmp_path / "flight")
    heartbeats = heartbeat.Heartbeats(0, locator, send, HangLimits(None, 60.0), pause=0.01)
    assert thrice.wait(LIMIT_SECONDS)
    (record,) = caplog.records  # said once
    assert "sending a heartbeat failed" in record.message
    heartbeats.end()
