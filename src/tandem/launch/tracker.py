"""Run the process that sends the run to a tracker, next to node 0's agent.

It is a separate process so that what a tracker's client imports, waits for or breaks does not affect the
agent. It learns of the launch's end, even of a killed launch, when its standard input closes.
"""

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

log = logging.getLogger("tandem.node")

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TRACKER_REQUEST_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""tandem itself retries a server that is down. At the end of a run, these limits avoid a wait of minutes."""


class TrackerProcess:
    """The tracker's process, from construction to `ended`; does nothing if the run has no tracker."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._name = settings.telemetry.remote_tracker
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        if self._name is not None:
            words = ["track", str(folder), "--tracker", self._name, "--follow"]
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tandem", *words],
                stdin=subprocess.PIPE,
                # The environment last: what the user has set wins.
                env=safe_path({**PATIENCE, **os.environ}),
                preexec_fn=ignore_stop_signals,  # it ends with the agent, after the last rows
            )

    def ended(self, code: int, has_no_time: Callable[[], bool]) -> None:
        """Wait for the last rows after the launch has ended, with a limit, and not after a second Ctrl-C."""
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
        """Close the process's input if `ended` was not called."""
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def __enter__(self) -> "TrackerProcess":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
