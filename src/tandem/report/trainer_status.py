"""Report progress to Kubeflow Trainer, which shows it in the TrainJob (KEP-2779, Trainer 2.2 and later)."""

import math
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tandem.report.sender import HttpRequest, HttpSender
from tandem.telemetry.messages import Heartbeat, Message, Point, RunStarted, Send, StepsDone
from tandem.timeouts import TRAINER_SECONDS

SERVER_URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
LONGEST_TOKEN = 64 * 1024
MOST_METRICS = 32
FINISHED_PERCENT = 100


class Endpoint(NamedTuple):
    """The status endpoint of this run's TrainJob: its address, and the files of its CA and of the token."""

    url: str
    ca: Path
    token: Path

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> "Endpoint | None":
        """Return the endpoint that the platform's variables name; None outside of such a TrainJob."""
        url, ca, token = (environ.get(name, "") for name in (SERVER_URL, CA_CERT, TOKEN))
        # Without TLS, anyone on the network path could read the token.
        return cls(url, Path(ca), Path(token)) if url.startswith("https://") and ca and token else None

    def request(self, body: object) -> HttpRequest:
        """Return a request with the current token and CA, which rotate. Raises OSError, ValueError."""
        with self.token.open(encoding="ascii") as file:
            token = file.read(LONGEST_TOKEN).strip()
        if not token.isprintable() or " " in token or not token:
            raise ValueError("not a token")
        headers = {"Authorization": f"Bearer {token}"}
        return HttpRequest(self.url, body, headers, ssl.create_default_context(cafile=str(self.ca)))


class JobProgress(NamedTuple):
    """The progress of a run. `planned`: None for a script, whose length tandem does not know."""

    step: int
    planned: int | None
    seconds_left: float | None
    metrics: Mapping[str, float]
    is_finished: bool = False


def status_of(progress: JobProgress, now: float) -> dict[str, Any]:
    """Return the document that the endpoint expects; `now` is Unix time. Unknown values are left out."""
    status: dict[str, Any] = {}
    if progress.is_finished:
        status |= {"progressPercentage": FINISHED_PERCENT, "estimatedRemainingSeconds": 0}
    elif progress.planned:
        # After the last step, the last evaluation and save are still to come.
        percent = math.floor(100 * progress.step / progress.planned)
        status["progressPercentage"] = max(0, min(percent, FINISHED_PERCENT - 1))
        if progress.seconds_left is not None and math.isfinite(progress.seconds_left):
            status["estimatedRemainingSeconds"] = max(0, round(progress.seconds_left))
    values = {"step": progress.step, **progress.metrics}
    status["metrics"] = [
        {"name": name, "value": f"{value:.6g}" if isinstance(value, float) else str(value)}
        for name, value in list(values.items())[:MOST_METRICS]
    ]
    status["lastUpdatedTime"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    return {"trainerStatus": status}


class TrainerStatus:
    """Posts the progress of one launch to an endpoint, from construction to `close`.

    The first post is immediate, and each further one at least TRAINER_SECONDS after the previous one.
    """

    def __init__(
        self, endpoint: Endpoint, batch_size: int, count: Send, pause: float = TRAINER_SECONDS
    ) -> None:
        self._endpoint = endpoint
        self._batch_size = batch_size
        # In the cluster, a proxy for outside addresses is never right.
        self._sender = HttpSender("trainer", count, most=1, pause=pause, uses_proxy=False)
        self._lock = threading.Lock()
        self._step = 0
        self._planned: int | None = None
        self._pace = 0.0
        self._metrics: dict[str, float] = {}
        self._is_finished = False
        self._changed()

    def handle(self, message: Message) -> None:
        """Store the parts of a message that the endpoint gets, and post them soon."""
        with self._lock:
            before = (self._step, self._planned, dict(self._metrics))
            match message:
                case RunStarted(step, _, planned):
                    self._step, self._planned = step, planned
                case StepsDone(step, loss, pace):
                    self._step, self._pace = step, pace
                    self._metrics |= {"samples_per_second": pace} if pace else {}
                    self._metrics |= {} if loss is None else {"loss": loss}
                case Point(_, _, values):
                    self._metrics |= _numbers_in(values)
                # A script reports its steps in no other way. A task's `StepsDone` comes at log lines only.
                case Heartbeat(0, step):
                    self._step = max(step, self._step)
            is_same = before == (self._step, self._planned, self._metrics)
        if not is_same:
            self._changed()

    def ended(self, state: str, code: int, reason: str) -> None:
        """Post the last state; after a finished run, 100%."""
        with self._lock:
            self._is_finished = state == "finished"
        self._changed()

    def flush(self, seconds: float, is_over: Callable[[], bool]) -> None:
        """Wait until the last state is posted, at most for `seconds`."""
        self._sender.flush(seconds, is_over)

    def close(self) -> None:
        self._sender.close()

    def _changed(self) -> None:
        self._sender.put(self._request)

    def _request(self) -> HttpRequest:
        with self._lock:
            left = None
            if self._planned is not None and self._pace > 0:
                left = (self._planned - self._step) * self._batch_size / self._pace
            known = JobProgress(self._step, self._planned, left, dict(self._metrics), self._is_finished)
        return self._endpoint.request(status_of(known, time.time()))


def _numbers_in(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl, with an evaluation's scores as `eval/NAME`."""
    groups = {"eval/": values.get("eval"), "train/": values.get("scores"), "": values}
    return {
        f"{prefix}{name}": float(value)
        for prefix, group in groups.items()
        for name, value in (group if isinstance(group, Mapping) else {}).items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name != "epoch"
    }
