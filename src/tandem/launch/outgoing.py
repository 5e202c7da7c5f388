"""Send the run to others: to a tracker, OpenTelemetry, a webhook (`--notify`) and Kubeflow Trainer.

Only node 0's agent does. Trackers and OpenTelemetry have separate processes, so that imports, waits and
errors of their clients do not affect the agent. When their standard input closes, the launch has ended, even
if it was killed. A killed process is restarted; the run directory records how far the run has been sent.
Messages to the webhook and to Trainer's status endpoint are sent in threads that nothing waits for while the
run lasts.
"""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.config import Settings
from tandem.errors import FINISHED, STOPPED
from tandem.process import safe_path
from tandem.report.notify import NOTIFIED, Notices
from tandem.report.otel import OTEL, is_wanted
from tandem.report.trainer_status import Endpoint, TrainerStatus
from tandem.signals import StopFlag, ignore_stop_signals
from tandem.telemetry.messages import Message, Send
from tandem.timeouts import (
    OUTGOING_END_SECONDS,
    STOPPED_END_SECONDS,
    SUPERVISE_SECONDS,
    TRACKER_END_SECONDS,
    TRACKER_LONGEST_PAUSE_SECONDS,
    TRACKER_REQUEST_SECONDS,
    TRACKER_RESTART_SECONDS,
)

log = logging.getLogger("tandem.node")

PATIENCE = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": str(TRACKER_REQUEST_SECONDS),
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}
"""tandem itself retries a server that is down; these limits avoid a wait of minutes at the end of a run."""


def trackers_of(settings: Settings, environ: Mapping[str, str]) -> list[str]:
    """Return the trackers of this launch, including OpenTelemetry if its variables ask for it."""
    chosen = settings.telemetry.remote_tracker
    return [*([chosen] if chosen else []), *([OTEL] if is_wanted(environ) else [])]


class TrackerProcess:
    """The process that sends to one tracker, from construction to `ended`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self._folder = folder
        self._lock = threading.Lock()
        self._last_words: bytes | None = None
        self._is_told = threading.Event()
        self._is_given_up = False
        self._process = self._start()
        threading.Thread(target=self._keep_running, name=f"tandem-{name}", daemon=True).start()

    def tell(self, words: bytes) -> None:
        """Close the process's input, at most once; `words` say how the launch has ended."""
        with self._lock:
            if self._last_words is None:
                self._last_words = words
                self._is_told.set()
                self._close_input(self._process)

    def wait(self, deadline: float, has_no_time: Callable[[], bool]) -> None:
        """Wait for the process to end until `deadline` (monotonic), then kill it."""
        while self._is_working() and time.monotonic() < deadline and not has_no_time():
            time.sleep(SUPERVISE_SECONDS)
        with self._lock:
            self._is_given_up = True
            if self._process.poll() is None:
                self._process.kill()
        if self._process.wait() != 0:
            say = "this run is not fully uploaded to %s; to send the rest, run: tandem track %s%s"
            log.warning(say, self._name, self._folder, " --tracker otel" if self._name == OTEL else "")

    def _is_working(self) -> bool:
        code = self._process.poll()
        return code is None or code < 0  # a killed one is about to be restarted

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", "track", str(self._folder), "--tracker", self._name, "--follow"],
            stdin=subprocess.PIPE,
            # The environment comes last: what the user has set wins.
            env=safe_path({**PATIENCE, **os.environ}),
            preexec_fn=ignore_stop_signals,  # it ends with the agent, after the last rows
        )
        if self._last_words is not None:
            self._close_input(process)
        return process

    def _close_input(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        with suppress(OSError):
            process.stdin.write(self._last_words or b"")
        with suppress(OSError):
            process.stdin.close()

    def _keep_running(self) -> None:
        pause = TRACKER_RESTART_SECONDS
        while (code := self._process.wait()) < 0:
            if not self._is_told.is_set():
                say = "the process that sends to %s was killed (signal %d); restarting it"
                log.warning(say, self._name, -code)
            self._is_told.wait(pause)  # at the end, the rest must be sent in time
            pause = min(2 * pause, TRACKER_LONGEST_PAUSE_SECONDS)
            with self._lock:
                if self._is_given_up:
                    return
                try:
                    self._process = self._start()
                except (OSError, subprocess.SubprocessError):  # no memory, for example; later, perhaps
                    time.sleep(SUPERVISE_SECONDS)


class TrackerProcesses:
    """The processes of one launch, from construction to `ended`; none if the run has no tracker."""

    def __init__(self, names: Sequence[str], folder: Path) -> None:
        self._processes = [TrackerProcess(name, folder) for name in names]

    def ended(self, code: int, has_no_time: Callable[[], bool]) -> None:
        """Wait, with a limit, for the last rows after the launch has ended, but not after a second Ctrl-C."""
        words = {FINISHED: b"finished", STOPPED: b"stopped"}.get(code, b"failed")
        for each in self._processes:
            each.tell(words)
        deadline = time.monotonic() + TRACKER_END_SECONDS
        for each in self._processes:
            each.wait(deadline, has_no_time)

    def __enter__(self) -> "TrackerProcesses":
        return self

    def __exit__(self, *_: Any) -> None:
        """Close the processes' input if `ended` was not called."""
        for each in self._processes:
            each.tell(b"")


class Outgoing:
    """Reports this launch to a webhook and to Kubeflow Trainer until `close`, if either is configured."""

    def __init__(self) -> None:
        self._receivers: list[Notices | TrainerStatus] = []

    def open(
        self,
        settings: Settings,
        environ: Mapping[str, str],
        run: str,
        events: Iterable[Mapping[str, Any]],
        count: Send,
        event: Callable[..., None],
        hide: Callable[[str], str],
    ) -> None:
        """Start reporting, on node 0.

        `count` takes samples, `event` writes a line to the journal, `hide` removes secrets from a text.
        """
        webhook = settings.telemetry.notify
        if webhook is not None and webhook.address:

            def delivered(what: str, cause: str) -> None:
                event(NOTIFIED, event=what, cause=cause)

            self._receivers.append(Notices(webhook, run, events, count, delivered, hide))
        elif webhook is not None:
            log.warning("--notify: %s has no secret part; no messages are sent; set TANDEM_NOTIFY", webhook)
        if (endpoint := Endpoint.of(environ)) is not None:
            self._receivers.append(TrainerStatus(endpoint, settings.data.batch_size, count))

    def handle(self, message: Message) -> None:
        """Process a message of a rank or an event of this agent."""
        for each in self._receivers:
            each.handle(message)

    def ended(self, state: str, code: int, reason: str) -> None:
        """Send how the launch ended, without waiting for it; `state`: finished, stopped or failed."""
        for each in self._receivers:
            each.ended(state, code, reason)

    def flush(self, stop: StopFlag) -> None:
        """Wait for the last messages: less time after a stop signal, none after a second Ctrl-C."""
        for each in self._receivers:
            each.flush(STOPPED_END_SECONDS if stop else OUTGOING_END_SECONDS, lambda: stop.interrupts > 1)

    def close(self) -> None:
        for each in self._receivers:
            each.close()
