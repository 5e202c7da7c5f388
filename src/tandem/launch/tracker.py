"""The process beside node 0's agent that sends the run to a tracker: what it imports, waits for or breaks is
its own affair. It hears of the end by its standard input, and of a launch that was killed as well."""

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED
from tandem.process import safe_path
from tandem.signals import ignore_stop_signals
from tandem.timeouts import SUPERVISE_SECONDS, TRACKER_END_SECONDS, TRACKER_REQUEST_SECONDS

log = logging.getLogger("tandem.launch")

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TRACKER_REQUEST_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""A server that is away is asked again by us, and at the end of a run nobody waits minutes for it."""


class TrackerProcess:
    """From its making to `ended`; nothing where the run has no tracker."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._name, self._folder = settings.telemetry.remote_tracker, folder
        self._process: subprocess.Popen[bytes] | None = None
        if self._name is not None:
            command = [
                sys.executable,
                "-m",
                "tandem",
                "track",
                str(folder),
                "--tracker",
                self._name,
                "--follow",
            ]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                env=safe_path({**PATIENCE, **os.environ}),
                preexec_fn=ignore_stop_signals,  # the agent's end is its end, and the last rows come before
            )

    def ended(self, code: int, has_no_time: Callable[[], bool]) -> None:
        """The launch has ended: wait for the last rows, not for ever, nor when a second Ctrl-C has come."""
        if self._process is None or self._process.stdin is None:
            return
        with suppress(OSError):
            self._process.stdin.write({FINISHED: b"finished", STOPPED: b"stopped"}.get(code, b"failed"))
            self._process.stdin.close()
        deadline = time.monotonic() + TRACKER_END_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline and not has_no_time():
            time.sleep(SUPERVISE_SECONDS)
        if self._process.poll() is None:
            self._process.kill()
        if self._process.wait() != 0:
            say = "this run is not fully uploaded to %s; to send the rest, run: tandem track %s"
            log.warning(say, self._name, self._folder)

    def close(self) -> None:
        """Where nobody has said how it ended."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def __enter__(self) -> "TrackerProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
