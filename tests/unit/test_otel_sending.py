"""What a collector gets from a run directory: everything, once, also if it is down, refuses, or is odd."""

import json
import logging
import queue
import time
from collections.abc import Iterator
from email.utils import formatdate
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from needs import require
from patience import patient
from tandem.config.address import secrets_in
from tandem.report import otel
from tandem.report.otel import ENDPOINT, is_installed
from tandem.report.tracking import follow
from tandem.run.directory import RunDir
from tandem.telemetry import metrics
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import RunStarted, StepsDone
from tandem.telemetry.registry import Registry
from tandem.telemetry.spans import OtelFiles, newest_metrics
from trials.collector import Collector


class Here:
    """A run directory with what an agent has written, and a collector."""

    def __init__(self, folder: Path, collector: Collector, environ: dict[str, str]) -> None:
        self.folder = folder
        self.log = folder / "log"
        self.collector = collector
        self.environ = environ
        (folder / "config.json").write_text('{"task": "digits"}')
        self.log.mkdir()
        self.registry = Registry()
        self.files = OtelFiles(self.log, self.registry.snapshot)
        self.files.open({"tandem.run": "r"})

    def sending(self) -> otel.OtelUpload:
        return otel.OtelUpload(RunDir(self.folder), secrets_in(self.environ), self.environ)

    def until_written(self, text: str) -> None:
        """The thread that writes has come that far, with the metrics after it."""
        deadline = time.monotonic() + patient(30)
        path = self.log / "otel-spans.jsonl"
        while not (path.exists() and text in path.read_text() and newest_metrics(self.log)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def finish(self, steps: int = 5) -> None:
        self.files.started({"tandem.generation": 1})
        self.registry.apply([metrics.STEPS.inc(steps), metrics.GLOBAL_STEP.set(steps)])
        Journal(self.folder).event("checkpoint", step=steps, seconds=0.25, bytes=7)
        (self.log / "rank-0.log").write_text("14:02:07 rank 0 | hello\n")
        self.files.finish("finished", "all done", {})

    def names(self) -> list[str]:
        return sorted(each.name for each in self.collector.spans())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Here]:
    require("otel", is_installed(), "the extra of this name")
    collector = Collector()
    environ = {ENDPOINT: collector.url, "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    for name, value in environ.items():  # which the exporters read
        monkeypatch.setenv(name, value)
    own = Here(tmp_path, collector, environ)
    yield own
    own.files.close()
    collector.close()


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[logging.LogRecord]":
    lines: queue.Queue[logging.LogRecord] = queue.Queue()
    monkeypatch.setattr(logging.getLogger("tandem.tracker"), "handlers", [QueueHandler(lines)])
    return lines


def test_each_is_sent_once(here: Here) -> None:
    here.finish()
    here.sending().send("finished")
    here.sending().send("finished")  # as after a kill
    assert here.names() == ["generation", "run", "save"]
    (save,) = here.collector.spans("save")
    (generation,) = here.collector.spans("generation")
    assert save.parent == generation.span and save.ended - save.began == pytest.approx(0.25)
    assert [each.name for each in here.collector.logs()] == ["hello"]
    assert len(here.collector.points("tandem_steps")) == 1
    assert here.collector.points("tandem_steps")[0].resource["service.instance.id"]


@pytest.mark.parametrize("has_metrics_of_it", [True, False])
def test_the_journal_knows_the_last_step(here: Here, has_metrics_of_it: bool) -> None:
    """The agent's messages may be lost, or it may be killed; the rank writes its lines itself."""
    here.files.started({"tandem.generation": 1})
    if has_metrics_of_it:
        here.registry.apply([metrics.GLOBAL_STEP.set(5), metrics.LOSS.set(1.0, split="train")])
    here.until_written("generation")
    Journal(here.folder).metrics(9, loss=0.25)
    here.sending().send("killed")
    assert here.collector.last("tandem_global_step") == 9
    assert here.collector.last("tandem_loss", split="train") == 0.25
    assert {each.cause for each in here.collector.spans()} == {"launch killed"}


def test_the_metrics_of_earlier_launches_come_first(here: Here) -> None:
    here.finish()
    (own,) = newest_metrics(here.log)
    old = {**json.loads(own.read_text()), "launch": 5.0, "first": 5.0, "time": 9.0}
    (here.log / "otel-metrics-5000.json").write_text(json.dumps(old))
    (here.log / "otel-metrics-4000.json").write_text("[")
    here.sending().send()
    assert [each.ended for each in here.collector.points("tandem_steps")][0] == 9.0
    assert len(here.collector.points("tandem_steps")) == 2
    assert newest_metrics(here.log) == [own]


def test_what_is_refused_for_good_is_left_out(here: Here, said: "queue.Queue[logging.LogRecord]") -> None:
    here.collector.answers = lambda path: 400 if "traces" in path else 200
    here.finish()
    sending = here.sending()
    sending.send("finished")
    assert here.collector.last("tandem_steps") == 5 and here.collector.logs()
    (line,) = [said.get_nowait().getMessage() for _ in range(said.qsize())]
    assert "traces" in line and "HTTP status 400" in line
    asked = len(here.collector.requests)
    sending.send("finished")
    assert len(here.collector.requests) == asked


def test_what_is_not_served_is_kept(here: Here, said: "queue.Queue[logging.LogRecord]") -> None:
    """A collector without logs costs one line; a proxy that answers 404 for a while costs no record."""
    here.collector.answers = lambda path: 404 if path in ("/v1/logs", "/v1/traces") else 200
    here.finish()
    sending = here.sending()
    assert sending.send() == 1
    asked = len(here.collector.requests)
    assert sending.send() == 0 and len(here.collector.requests) == asked, "it pauses"
    lines = sorted(said.get_nowait().getMessage() for _ in range(said.qsize()))
    assert ["OTEL_LOGS_EXPORTER=none" in lines[0], "OTEL_TRACES_EXPORTER=none" in lines[1]] == [True, True]
    assert len(lines) == 2 and "404" in lines[0]
    here.collector.answers = lambda path: 200
    sending.send("finished")
    assert here.names() == ["generation", "run", "save"] and here.collector.logs()


@pytest.mark.parametrize("answer", [302, 500])
def test_an_answer_that_is_no_success(here: Here, answer: int) -> None:
    """The exporters take a redirect, as of a proxy's login page, for success."""
    here.collector.answers = lambda path: answer
    here.finish()
    with pytest.raises(Exception, match=str(answer)):
        here.sending().send("finished")
    here.collector.answers = lambda path: 200
    here.sending().send("finished")
    assert here.names() == ["generation", "run", "save"] and here.collector.logs()
    assert here.collector.last("tandem_steps") == 5


def test_a_request_that_fails_is_not_repeated_at_once(here: Here) -> None:
    """The exporters would repeat it for their whole timeout, each, and delay the end of a launch by that."""
    here.collector.answers = lambda path: 503
    here.finish()
    sending = here.sending()
    for asked in (3, 6):
        with pytest.raises(Exception, match="503"):
            sending.send("finished")
        assert len(here.collector.requests) == asked


@pytest.mark.parametrize(
    "wait", ["3600", formatdate(time.time() + 7200, usegmt=True)], ids=["seconds", "date"]
)
def test_a_collector_that_asks_for_time_gets_it(here: Here, wait: str) -> None:
    here.collector.answers = lambda path: 429
    here.collector.headers["Retry-After"] = wait
    here.files.started({"tandem.generation": 1})
    here.until_written("generation")
    sending = here.sending()
    for _ in range(3):
        with pytest.raises(Exception, match="metrics: HTTP status 429"):
            sending.send()
        assert [path for _, path, _ in here.collector.requests] == ["/v1/metrics"]
    here.collector.answers = lambda path: 200
    here.finish()
    sending.send("finished")  # the last time to ask
    assert here.collector.last("tandem_steps") == 5


@pytest.mark.parametrize(("text", "seconds"), [
    ("7", 7.0), ("0", 0.0), ("-1", None), ("soon", None), ("", None), ("9" * 400, 600.0),
    ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
])  # fmt: skip
def test_how_long_a_collector_may_ask_for(text: str, seconds: float | None) -> None:
    require("otel", is_installed(), "the extra of this name")
    from tandem.report.otlp import _retry_after

    assert _retry_after(text) == seconds


def test_a_short_wait_is_no_failure(here: Here) -> None:
    here.collector.headers["Retry-After"] = "1"
    answers = iter([429])
    here.collector.answers = lambda path: next(answers, 200)
    here.finish()
    here.sending().send("finished")
    assert here.names() == ["generation", "run", "save"] and here.collector.last("tandem_steps") == 5


def test_logs_are_sent_without_secrets(here: Here) -> None:
    here.environ["MY_API_KEY"] = "nobodyKnowsThis"
    here.finish()
    (here.log / "rank-0.log").write_text(
        "14:02:07 rank 0 | key nobodyKnowsThis\nalso nobodyKnowsThis\n14:02:08 rank 0 | password=abcdef12\n"
    )
    here.sending().send("finished")
    texts = [each.name for each in here.collector.logs()]
    assert texts == ["key [hidden]\nalso [hidden]", "password=[hidden]"]


def test_one_signal_down_keeps_no_other_waiting(here: Here) -> None:
    """Also the last step and the end arrive, though another signal's server is down to the end."""
    here.collector.answers = lambda path: 503 if "logs" in path else 200
    here.finish()
    with pytest.raises(Exception, match="logs: HTTP status 503"):
        here.sending().send("finished")
    assert here.names() == ["generation", "run", "save"] and here.collector.last("tandem_steps") == 5
    here.collector.answers = lambda path: 503 if "traces" in path else 200
    assert not here.collector.logs()
    here.sending().send("finished")
    (entry,) = here.collector.logs()
    assert entry.span in {each.span for each in here.collector.spans()}


def test_saves_wait_for_their_trace(here: Here) -> None:
    """A collector that is down when the first epoch ends must not cost the saves of that time."""
    here.files.started({"tandem.generation": 1})
    here.files.handle(RunStarted(0, 10, 20))
    here.files.handle(StepsDone(10, None, 0.0))
    Journal(here.folder).event("checkpoint", step=10, seconds=0.25, bytes=7)
    here.until_written('"end"')
    here.collector.answers = lambda path: 503
    sending = here.sending()
    with pytest.raises(Exception, match="503"):
        sending.send()
    here.collector.answers = lambda path: 200
    here.files.finish("finished", "", {})
    sending.send("finished")
    assert here.names() == ["epoch", "epoch", "generation", "run", "save"]


@pytest.mark.slow
def test_a_backlog_is_sent_to_its_end(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "MOST_ROUNDS", 1)
    here.finish()
    lines = [f"14:02:07 rank 0 | line {number:06}\n" for number in range(30_000)]
    (here.log / "rank-0.log").write_text("".join(lines))
    sending = here.sending()
    sending.send()
    assert 0 < len(here.collector.logs()) < 20_000, "the others have their turn"
    sending.send("finished")
    assert [each.name for each in here.collector.logs()] == [f"line {number:06}" for number in range(30_000)]


@pytest.mark.slow
def test_what_has_arrived_is_not_sent_again(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that takes some requests gets each log record once: they have no IDs."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "100")  # a slow one has taken what it has not answered
    here.finish()
    text = "".join(f"14:02:07 rank 0 | {number}\n" for number in range(40_000))
    (here.log / "rank-0.log").write_text(text)
    taken: list[str] = []

    def answers(path: str) -> int:
        taken.append(path)
        return 200 if path != "/v1/logs" or taken.count(path) % 2 else 401

    here.collector.answers = answers
    sending = here.sending()
    for _ in range(20):
        try:
            sending.send("finished")
            break
        except Exception as error:
            assert "401" in str(error)
    assert [each.name for each in here.collector.logs()] == [str(number) for number in range(40_000)]


def test_damaged_files_keep_nothing_waiting(here: Here) -> None:
    bad = {"is": "begin", "name": "epoch", "time": 1.0, "attributes": {}}
    here.finish()
    with (here.log / "otel-spans.jsonl").open("a") as file:
        for parent in ("zz", "ab", "f" * 40):
            file.write(json.dumps({**bad, "span": parent, "parent": parent}) + "\n")
            file.write(json.dumps({**bad, "is": "end", "span": parent, "cause": ""}) + "\n")
    sent = {"marks": {"events.jsonl": "x", "rank-0.log": [1]}, "begun": 3}
    (here.log / "otel-sent.json").write_text(json.dumps(sent))
    here.sending().send("finished")
    assert here.collector.logs() and here.collector.last("tandem_steps") == 5
    asked = len(here.collector.requests)
    here.sending().send("finished")
    assert len(here.collector.requests) == asked


def test_a_failure_at_the_end_is_tried_again(here: Here) -> None:
    here.finish()
    answers = iter([500, 500, 500])
    here.collector.answers = lambda path: next(answers, 200)
    assert follow(here.sending(), "OpenTelemetry", lambda pause: None if pause else "finished")
    assert here.names() == ["generation", "run", "save"] and here.collector.logs()
    assert here.collector.last("tandem_steps") == 5


def test_what_the_exporters_log_has_no_secret(
    here: Here, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    headers = "api-key: notForAnyone,x-team=notForAnyoneEither%0Aa"
    here.environ["OTEL_EXPORTER_OTLP_HEADERS"] = headers
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
    here.finish()
    sending = here.sending()
    here.collector.answers = lambda path: 503
    with pytest.raises(Exception) as raised:
        sending.send("finished")
    printed = capfd.readouterr()
    assert "Header format invalid" in printed.err and "Failed to export" in printed.err
    assert "notForAnyone" not in printed.err + printed.out + sending.words(raised.value)
