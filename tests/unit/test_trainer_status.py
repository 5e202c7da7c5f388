"""Progress for Kubeflow Trainer: what is posted, how often, and what a bad server or token costs."""

import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from receivers import Authority, Receiver
from tandem.report import sender, trainer_status
from tandem.report.trainer_status import Endpoint, JobProgress, TrainerStatus, status_of
from tandem.telemetry.messages import Heartbeat, Point, RunStarted, Samples, StepsDone

PAUSE = 0.3
"""Between two posts, here; 5 s outside of tests."""
LIMIT = 20.0


def never() -> bool:
    return False


def of(posted: Any) -> dict[str, Any]:
    """The status, with its metrics as a dict."""
    status = dict(posted.body["trainerStatus"])
    status["metrics"] = {each["name"]: each["value"] for each in status["metrics"]}
    return status


def test_the_document() -> None:
    left = 7260.4
    status = status_of(JobProgress(450, 1000, left, {"loss": 0.234712, "eval/accuracy": math.nan}), 0.0)
    assert status == {"trainerStatus": {
        "progressPercentage": 45, "estimatedRemainingSeconds": 7260,
        "metrics": [
            {"name": "step", "value": "450"}, {"name": "loss", "value": "0.234712"},
            {"name": "eval/accuracy", "value": "nan"},
        ],
        "lastUpdatedTime": "1970-01-01T00:00:00Z",
    }}  # fmt: skip


@pytest.mark.parametrize(("progress", "percent", "left"), [
    (JobProgress(0, None, None, {}), None, None),  # a script
    (JobProgress(0, 100, None, {}), 0, None),
    (JobProgress(100, 100, 0.0, {}), 99, 0),  # the last save is still to come
    (JobProgress(120, 100, -3.0, {}), 99, 0),
    (JobProgress(1, 3, math.inf, {}), 33, None),
    (JobProgress(40, 100, 5.0, {}, is_finished=True), 100, 0),  # ended early by the task
    (JobProgress(40, None, None, {}, is_finished=True), 100, 0),
])  # fmt: skip
def test_percentages(progress: JobProgress, percent: int | None, left: int | None) -> None:
    status = status_of(progress, 0.0)["trainerStatus"]
    assert (status.get("progressPercentage"), status.get("estimatedRemainingSeconds")) == (percent, left)


def test_many_metrics_are_cut() -> None:
    many = {f"score {number}": 1.0 for number in range(1000)}
    assert len(status_of(JobProgress(0, 1, None, many), 0.0)["trainerStatus"]["metrics"]) == 32


@pytest.mark.parametrize("missing", ["URL", "CA_CERT", "TOKEN", "TLS"])
def test_elsewhere_nothing_is_posted(missing: str) -> None:
    environ = {
        "KUBEFLOW_TRAINER_SERVER_URL": "https://x/status",
        "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/ca",
        "KUBEFLOW_TRAINER_SERVER_TOKEN": "/token",
    }
    assert Endpoint.of(environ) == ("https://x/status", Path("/ca"), Path("/token"))
    environ.pop(f"KUBEFLOW_TRAINER_SERVER_{missing}", None)
    if missing == "TLS":
        environ["KUBEFLOW_TRAINER_SERVER_URL"] = "http://x/status"
    assert Endpoint.of(environ) is None


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates") / "right")


class Cluster:
    """The platform's side: a server with TLS, and the files that its variables name."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        self.receiver = Receiver(authority.tls)
        self.token = folder / "token"
        self.token.write_text("token-1\n")
        self.endpoint = Endpoint(f"{self.receiver.url}/apis/status", authority.ca, self.token)
        self.counted: list[Samples] = []

    def start(self, batch_size: int = 10) -> TrainerStatus:
        return TrainerStatus(self.endpoint, batch_size, self.counted.append, PAUSE)  # type: ignore[arg-type]

    def outcomes(self) -> list[str]:
        return [each.labels["outcome"] for message in self.counted for each in message.samples]

    def check_pauses(self) -> None:
        times = [each.at for each in self.receiver.posted]
        assert all(after - before >= PAUSE for before, after in zip(times, times[1:], strict=False)), times


@pytest.fixture
def cluster(authority: Authority, tmp_path: Path) -> Iterator[Cluster]:
    here = Cluster(authority, tmp_path)
    yield here
    here.receiver.close()


def test_a_finished_task(cluster: Cluster) -> None:
    status = cluster.start()
    cluster.receiver.until(1)  # at once
    assert "progressPercentage" not in of(cluster.receiver.posted[0])
    status.handle(RunStarted(0, 100, 1000))
    for step in range(1, 900):  # faster than it may post
        status.handle(StepsDone(step, 1 / step, 100.0))
        status.handle(Point(step, 0.0, {"loss": 1 / step, "epoch": 0.1, "phases": {"data": 1.0}}))
        time.sleep(0.001)
    status.handle(Point(899, 0.0, {"eval": {"accuracy": 0.5}}))
    status.ended("finished", 0, "")
    status.flush(LIMIT, never)
    last = of(cluster.receiver.posted[-1])
    assert last["progressPercentage"] == 100 and last["estimatedRemainingSeconds"] == 0
    assert last["metrics"] == {
        "step": "899", "samples_per_second": "100", "loss": "0.00111235", "eval/accuracy": "0.5",
    }  # fmt: skip
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", last["lastUpdatedTime"])
    cluster.check_pauses()
    assert set(cluster.outcomes()) == {"sent"} and len(cluster.outcomes()) == len(cluster.receiver.posted)
    status.close()


def test_a_script_shows_its_steps_and_no_percentage_until_its_end(cluster: Cluster) -> None:
    status = cluster.start()
    cluster.receiver.until(1)
    for step in (5, 7):
        status.handle(Heartbeat(0, step, "train", "other", 0.0, 1.0, 1.0, True, False))
        status.handle(Heartbeat(1, step + 1, "train", "other", 0.0, 1.0, 1.0, True, False))
    shown = of(cluster.receiver.until(2)[-1])
    assert shown["metrics"] == {"step": "7"} and "progressPercentage" not in shown
    status.ended("finished", 0, "")
    status.flush(LIMIT, never)
    assert of(cluster.receiver.posted[-1])["progressPercentage"] == 100
    cluster.check_pauses()


def test_the_steps_of_a_task_since_its_last_log_line_are_shown(cluster: Cluster) -> None:
    status = cluster.start()
    cluster.receiver.until(1)
    status.handle(RunStarted(500, 100, 1000))
    status.handle(StepsDone(600, None, 0.0))
    status.handle(Heartbeat(0, 609, "train", "other", 0.0, 1.0, 1.0, True, False))
    status.ended("failed", 1, "rank 1 was killed")
    status.flush(LIMIT, never)
    assert of(cluster.receiver.posted[-1])["metrics"]["step"] == "609"
    # Ranks that restart go back to an earlier step.
    status.handle(RunStarted(500, 100, 1000))
    status.flush(LIMIT, never)
    assert of(cluster.receiver.posted[-1])["metrics"]["step"] == "500"
    status.close()


def test_a_failed_run_keeps_its_percentage(cluster: Cluster) -> None:
    status = cluster.start()
    status.handle(RunStarted(500, 100, 1000))
    status.handle(StepsDone(600, None, 0.0))
    status.ended("failed", 1, "rank 0 failed")
    status.flush(LIMIT, never)
    last = of(cluster.receiver.posted[-1])
    assert last["progressPercentage"] == 60 and "estimatedRemainingSeconds" not in last


def test_nothing_new_is_not_posted(cluster: Cluster) -> None:
    status = cluster.start()
    cluster.receiver.until(1)
    beat = Heartbeat(0, 0, "startup", "", 0.0, 1.0, 1.0, False, False)
    for _ in range(5):
        status.handle(beat)
    time.sleep(2 * PAUSE)
    assert len(cluster.receiver.posted) == 1


def test_the_token_is_read_for_each_request(cluster: Cluster) -> None:
    status = cluster.start()
    for number in range(1, 5):
        cluster.receiver.until(number)
        # As the kubelet replaces it: by renaming.
        new = cluster.token.with_name("new")
        new.write_text(f"token-{number + 1}")
        new.replace(cluster.token)
        status.handle(StepsDone(number, 1.0, 1.0))
    sent = [each.headers["authorization"] for each in cluster.receiver.until(5)]
    assert sent == [f"Bearer token-{number}" for number in range(1, 6)]
    assert cluster.receiver.posted[0].headers["content-type"] == "application/json"
    assert cluster.receiver.posted[0].path == "/apis/status"


@pytest.mark.parametrize("fault", ["429", "500", "hang", "no token", "a bad token", "no CA"])
def test_a_fault_that_passes_is_counted_and_the_end_arrives(
    cluster: Cluster, fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(sender, "OUTGOING_RETRY_SECONDS", PAUSE)
    ca = cluster.endpoint.ca.with_name("missing.pem")
    if fault.isdigit():
        cluster.receiver.answers = lambda number: 200 if is_over.is_set() else int(fault)
    elif fault == "hang":
        monkeypatch.setattr(trainer_status.HttpSender.__init__, "__defaults__", (0.0, True, 0.2))
        cluster.receiver.answers = lambda number: 200 if is_over.is_set() else 1.0
    elif fault == "no token":
        cluster.token.unlink()
    elif fault == "a bad token":
        cluster.token.write_text("two words\r\nX-More: 1")
    else:
        cluster.endpoint = cluster.endpoint._replace(ca=ca)
    with caplog.at_level(logging.WARNING, "tandem"):
        status = cluster.start()
        began = time.monotonic()
        for step in range(1, 50):
            status.handle(StepsDone(step, 1.0, 1.0))
        assert time.monotonic() - began < 1, "no message waits"
        deadline = time.monotonic() + LIMIT
        while "failed" not in cluster.outcomes():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        is_over.set()
        cluster.token.write_text("token-2")
        ca.write_bytes(cluster.receiver and (cluster.endpoint.ca.parent / "ca.pem").read_bytes())
        status.ended("finished", 0, "")
        status.flush(LIMIT, never)
    ca.unlink()
    assert of(cluster.receiver.posted[-1])["progressPercentage"] == 100
    assert cluster.outcomes()[-1] == "sent" and len(caplog.records) == 1
    assert "token-" not in caplog.text and cluster.receiver.url not in caplog.text
    cluster.check_pauses()


def test_a_server_with_a_certificate_of_another_ca_gets_no_token(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority(tmp_path / "wrong")
    cluster.endpoint = cluster.endpoint._replace(ca=other.ca)
    with caplog.at_level(logging.WARNING, "tandem"):
        status = cluster.start()
        status.flush(3 * PAUSE, never)
        status.close()
    assert not cluster.receiver.posted and set(cluster.outcomes()) == {"failed"}
    assert len(caplog.records) == 1 and "certificate" in caplog.text
