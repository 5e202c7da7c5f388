"""OpenTelemetry: what its variables ask for, spans from messages, and logs that rotate."""

import json
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import QueueHandler
from pathlib import Path
from typing import Any

import pytest

from tandem.config.address import hide, secrets_in
from tandem.errors import ConfigError
from tandem.report import otel
from tandem.report.log_lines import LogEntry, Mark, entries, new_lines
from tandem.report.otel import OtelChoice, SendProgress, is_wanted, resource_of
from tandem.run.directory import RunDir
from tandem.telemetry import metrics
from tandem.telemetry import spans as writing
from tandem.telemetry.messages import Heartbeat, Point, RunStarted, StepsDone
from tandem.telemetry.registry import Registry
from tandem.telemetry.spans import OtelFiles, Span, Spans, newest_metrics

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
ALL = ("metrics", "traces", "logs")


@pytest.mark.parametrize(("environ", "signals"), [
    ({}, ()),
    ({ENDPOINT: "http://c:4318"}, ALL),
    ({ENDPOINT: ""}, ()),
    ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "True"}, ()),
    ({ENDPOINT: "http://c:4318", "OTEL_LOGS_EXPORTER": "none"}, ("metrics", "traces")),
    ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "console, otlp"}, ALL),
    ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "https://c/v1/traces"}, ("traces",)),
    ({ENDPOINT: "http://c:4317", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ()),
    ({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "grpc"}, ("metrics", "traces")),
    ({ENDPOINT: "c:4318"}, ()),
    ({ENDPOINT: "user:hunter@c:4318"}, ()),
])  # fmt: skip
def test_what_is_sent(environ: dict[str, str], signals: tuple[str, ...]) -> None:
    choice = OtelChoice.of(environ)
    assert choice.signals == signals
    is_mistake = "grpc" in environ.values() or environ.get(ENDPOINT, "h").startswith(("c:", "user:"))
    assert bool(choice.problems) == is_mistake
    assert "hunter" not in str(choice.problems), "a value may have a password"
    assert all("4318" in problem for problem in choice.problems) and len(choice.problems) <= 1


@pytest.mark.parametrize(("text", "seconds"), [("500", 0.5), ("", 60.0), ("often", 60.0), ("-1", 60.0)])
def test_the_interval(text: str, seconds: float) -> None:
    assert OtelChoice.of({ENDPOINT: "http://c:4318", otel.INTERVAL: text}).interval == seconds


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> "queue.Queue[logging.LogRecord]":
    lines: queue.Queue[logging.LogRecord] = queue.Queue()
    monkeypatch.setattr(otel.log, "handlers", [QueueHandler(lines)])
    return lines


def test_without_the_package_one_line_says_so(
    said: "queue.Queue[logging.LogRecord]", monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(otel, "find_spec", lambda name: None)
    assert not is_wanted({}) and said.empty()
    assert not is_wanted({ENDPOINT: "http://c:4318", "OTEL_EXPORTER_OTLP_HEADERS": "key=secret"})
    line = said.get_nowait().getMessage()
    assert said.empty() and "pip install 'tandem-train[otel]'" in line and "OTLP_ENDPOINT" in line
    with pytest.raises(ConfigError, match="tandem-train"):
        otel.OtelUpload(RunDir(tmp_path), [], {ENDPOINT: "http://c:4318"})
    with pytest.raises(ConfigError, match="set OTEL_EXPORTER_OTLP_ENDPOINT=http"):
        otel.OtelUpload(RunDir(tmp_path), [], {})


def test_pods(tmp_path: Path) -> None:
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "digits-worker-1"}
    assert resource_of(pod, tmp_path, "digits", "me")["k8s.pod.name"] == "digits-worker-1"
    indexed = {**pod, "HOSTNAME": "digits-3", "JOB_COMPLETION_INDEX": "3"}
    found = resource_of(indexed, tmp_path, "digits", "me")
    assert found["k8s.job.name"] == "digits" and "k8s.pod.name" not in found
    elsewhere = resource_of({"HOSTNAME": "laptop"}, tmp_path, "digits", "me")
    assert not [name for name in elsewhere if name.startswith("k8s.")]
    assert (elsewhere["service.name"], elsewhere["service.instance.id"]) == ("tandem", "me")


def beat(step: int, activity: str = "train") -> Heartbeat:
    return Heartbeat(0, step, activity, "", 0.0, 1.0, 1.0, True, False)


class Lines:
    """The lines of a launch, and the spans that a reader makes of them."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.spans = Spans(self.write, 0.0, {"tandem.run": "r"})

    def write(self, line: dict[str, object]) -> None:
        more = {"logs": {}} if line["is"] == "launch" else {}
        self.lines.append(json.dumps({**line, **more}).encode())

    def read(self, position: SendProgress | None = None) -> list[Span]:
        position = SendProgress({}) if position is None else position
        return [span for line in self.lines for span in position.take(line)]


def by_kind(spans: list[Span]) -> list[Span]:
    """Epochs in their order with the evaluation after the first, then generation and run."""
    kinds = {name: [each for each in spans if each.name == name] for name in ("epoch", "evaluation")}
    (generation,) = [each for each in spans if each.name == "generation"]
    (run,) = [each for each in spans if each.name == "run"]
    first, *others = kinds["epoch"]
    return [first, *kinds["evaluation"], *others, generation, run]


def test_epochs_and_evaluations() -> None:
    launch = Lines()
    launch.spans.handle(beat(3), 0.5)  # of no generation
    launch.spans.started(1.0, {"tandem.generation": 1})
    launch.spans.handle(RunStarted(50, 100, 250), 10.0)
    launch.spans.handle(StepsDone(60, None, 0.0), 11.0)
    launch.spans.handle(beat(100, "eval"), 15.0)
    launch.spans.handle(beat(100, "eval"), 15.2)
    launch.spans.handle(Point(100, 15.9, {"eval": {"accuracy": 0.5}}), 15.9)
    launch.spans.handle(beat(100), 16.0)
    launch.spans.handle(StepsDone(95, None, 0.0), 16.1)  # overtaken
    launch.spans.handle(StepsDone(220, None, 0.0), 28.0)
    launch.spans.closed("stop", "all have saved", 30.0, {"tandem.exit_code": 143})
    first, evaluation, second, third, generation, run = by_kind(launch.read())
    assert (first.began, first.ended, first.cause) == (10.0, 15.0, "finished")
    assert (evaluation.began, evaluation.ended) == (15.0, 16.0)
    assert evaluation.attributes == {"tandem.step": 100, "tandem.score.accuracy": 0.5}
    assert (second.began, second.ended) == (15.0, pytest.approx(26.0, abs=0.5))
    assert (third.attributes["tandem.epoch"], third.ended, third.cause) == (3, 30.0, "stop")
    assert (generation.began, generation.ended, generation.parent) == (0.0, 30.0, run.span)
    assert {each.parent for each in (first, second, third, evaluation)} == {generation.span}
    assert (run.parent, run.cause, run.is_error) == ("", "stop", False)
    assert run.attributes["tandem.exit_code"] == 143


def test_an_evaluation_keeps_its_scores_if_messages_overtake_others() -> None:
    """Heartbeats come from two threads of a rank."""
    launch = Lines()
    launch.spans.started(1.0, {})
    launch.spans.handle(RunStarted(50, 1000, 2000), 10.0)
    launch.spans.handle(beat(100, "eval"), 15.0)
    launch.spans.handle(beat(100), 15.1)  # was older
    launch.spans.handle(beat(100, "eval"), 15.5)
    launch.spans.handle(beat(100), 16.0)
    launch.spans.handle(Point(100, 15.9, {"eval": {"accuracy": 0.5}}), 16.1)
    launch.spans.handle(StepsDone(101, None, 0.0), 17.0)
    launch.spans.handle(beat(100, "eval"), 17.1)  # was older
    launch.spans.handle(beat(200, "eval"), 20.0)
    launch.spans.handle(Point(200, 20.5, {"eval": {"accuracy": 0.75}}), 20.5)
    launch.spans.handle(beat(200), 21.0)
    launch.spans.handle(beat(300, "eval"), 25.0)
    launch.spans.handle(beat(300), 25.5)  # of a rank that loses its peer
    launch.spans.closed("failure", "", 26.0, {})
    first, second, third = [each for each in launch.read() if each.name == "evaluation"]
    assert (first.began, first.ended, first.cause) == (15.0, 16.0, "finished")
    assert first.attributes == {"tandem.step": 100, "tandem.score.accuracy": 0.5}
    assert (second.began, second.ended, second.cause) == (20.0, 21.0, "finished")
    assert second.attributes == {"tandem.step": 200, "tandem.score.accuracy": 0.75}
    assert (third.ended, third.cause, third.attributes) == (26.0, "failure", {"tandem.step": 300})


@pytest.mark.parametrize(("event", "cause"), [
    (("rank_killed", {"rank": 1}), "rank killed"),
    (("recovered", {"cause": "node 1 was lost"}), "node lost"),
    (("recovered", {"cause": "rank 1 on node 0 hung"}), "hang"),
    (None, "other"),
])  # fmt: skip
def test_a_generation_ends_with_its_cause(event: Any, cause: str) -> None:
    launch = Lines()
    launch.spans.started(0.0, {})
    launch.spans.handle(RunStarted(0, 100, 250), 1.0)
    launch.spans.ended(5.0)
    launch.spans.handle(beat(9), 5.1)  # of a rank that is ending
    launch.spans.started(6.0, {})
    launch.spans.event("checkpoint", {})
    if event is not None:
        launch.spans.event(*event)
    launch.spans.ended(9.0)
    launch.spans.closed("failure", "rank 0 on node 0 was killed (SIGKILL)", 9.5, {})
    epoch, first, second, run = launch.read()
    assert (epoch.cause, epoch.ended, first.cause, first.ended) == (cause, 5.0, cause, 5.0)
    assert (second.began, second.cause) == (5.0, "rank killed")
    assert (run.cause, run.is_error) == ("rank killed", True)


def test_many_epochs_at_once_are_no_flood() -> None:
    launch = Lines()
    launch.spans.started(0.0, {})
    launch.spans.handle(RunStarted(0, 1, 10**9), 0.0)
    launch.spans.handle(StepsDone(10**6, None, 0.0), 1.0)
    assert len(launch.lines) < 300
    launch.spans.closed("finished", "", 2.0, {})
    assert launch.read()[-3].attributes["tandem.epoch"] == 10**6 + 1


def test_a_killed_launch_is_ended_by_the_next() -> None:
    first, second, position = Lines(), Lines(), SendProgress({})
    first.spans.started(1.0, {})
    first.spans.handle(RunStarted(0, 100, 250), 3.0)
    assert not first.read(position)
    position = SendProgress(json.loads(json.dumps(vars(position))))  # this process was killed, too
    second.lines[0] = second.lines[0].replace(b'"time": 0.0', b'"time": 50.0')
    spans = second.read(position)
    assert [(each.name, each.ended, each.cause) for each in spans] == [
        ("epoch", 3.0, "launch killed"), ("generation", 3.0, "launch killed"), ("run", 3.0, "launch killed"),
    ]  # fmt: skip
    second.spans.closed("finished", "", 60.0, {})
    (run,) = [span for line in second.lines[1:] for span in position.take(line)]
    assert run.linked == (spans[0].trace, spans[-1].span) and run.trace != spans[0].trace


def test_a_cause_that_a_killed_agent_did_not_know() -> None:
    launch, position = Lines(), SendProgress({})
    launch.spans.started(1.0, {"tandem.generation": 1})
    launch.spans.handle(RunStarted(0, 100, 250), 3.0)
    launch.spans.ended(5.0)
    launch.spans.started(6.0, {"tandem.generation": 2})
    assert not launch.read(position)
    epoch, first, second, run = sorted(position.killed(), key=lambda each: (each.name, each.began))
    assert (epoch.cause, epoch.ended, first.cause, first.ended) == ("other", 5.0, "other", 5.0)
    assert second.cause == run.cause == "launch killed" and second.ended == run.ended == 5.0


@pytest.mark.parametrize("line", [
    b"", b"[]", b"{}", b'{"is": "launch"}', b'{"is": "begin", "name": 3}', b'{"is": "end", "span": []}',
    b"\xff",
    b'{"is": "launch", "trace": "ab", "span": "cd", "time": "now", "attributes": {}, "logs": []}',
])  # fmt: skip
def test_bad_lines_are_skipped(line: bytes) -> None:
    position = SendProgress({"open": 3, "begun": None, "marks": "no"})
    assert list(position.take(line)) == [] and position.saved(line) is None


def test_lines_of_a_file_that_rotates(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    assert new_lines(path, None) == ([], None)
    path.write_bytes(b"one\ntwo\nhal")
    lines, mark = new_lines(path, None)
    assert lines == [b"one", b"two"] and new_lines(path, mark)[0] == []
    with path.open("ab") as file:
        file.write(b"f\n")
    path.rename(tmp_path / "rank-0.log.1")
    path.write_bytes(b"new\n")
    lines, mark = new_lines(path, mark)
    assert lines == [b"half"]
    lines, mark = new_lines(path, mark)
    assert lines == [b"new"] and new_lines(path, mark)[0] == []
    path.write_bytes(b"x")
    assert new_lines(path, mark)[0] == [] and new_lines(path, mark, to_the_end=True)[0] == [b"x"]
    assert new_lines(path, Mark(1, 5))[0] == [b"one", b"two", b"half"]  # of no file that is still there


@pytest.mark.parametrize("found", [None, 3, [], [1], [1, 2, 3], ["1", 2], [1, -2], {"1": 2}])
def test_what_is_no_mark(found: Any) -> None:
    assert Mark.of(found) is None and Mark.of([1, 2]) == Mark(1, 2)


def test_long_lines_and_long_files_are_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    content = b"".join(b"%d\n" % number for number in range(100_000)) + b"x" * 300_000 + b"\nend\n"
    path.write_bytes(content)
    lines, mark = new_lines(path, None)
    read = lines
    while lines:
        lines, mark = new_lines(path, mark)
        read = [*read, *lines]
    assert read[:100_000] == [b"%d" % number for number in range(100_000)]
    assert b"".join(read[100_000:-1]) == b"x" * 300_000 and read[-1] == b"end"


def test_entries_of_both_formats() -> None:
    lines = [
        b"14:02:07 rank 3 | warning: slow",
        b"Traceback:",
        b"  line",
        b'{"time": "2026-11-27T01:02:03.500Z", "level": "error", "rank": null, "node": 1, "step": 7, '
        b'"message": "lost", "exception": "ValueError"}',
        b"14:02:08 node 0 | back",
    ]
    first, second, third = entries(lines, "rank-3.log", 1_000_000.0)
    assert (first.level, first.text) == ("warning", "slow\nTraceback:\n  line")
    assert first.attributes == {"log.file.name": "rank-3.log", "tandem.rank": 3}
    assert 0 <= 1_000_060 - first.time < 86_400
    assert (second.time, second.level, second.text) == (1795741323.5, "error", "lost\nValueError")
    assert second.attributes == {"log.file.name": "rank-3.log", "tandem.node": 1, "tandem.step": 7}
    assert (third.level, third.text) == ("info", "back")
    (only,) = entries([b"Killed"], "rank-3.log", 5.0)
    assert only == LogEntry(5.0, "", "Killed", {"log.file.name": "rank-3.log"})


def test_a_snapshot_of_the_registry() -> None:
    registry = Registry()
    registry.apply([
        metrics.STEPS.inc(3), metrics.LOSS.set(0.5, split="train"), metrics.RUN_STATE.enter("training"),
        metrics.STEP_DURATION_SECONDS.observe(0.0015, 0.0015, 500.0),
        metrics.BUILD_INFO.set(version="1", revision="", python="", torch="", cuda="", nccl=""),
    ])  # fmt: skip
    found = {each["name"]: each for each in registry.snapshot()}
    assert found["tandem_steps"]["points"] == [[{}, 3.0]] and found["tandem_steps"]["kind"] == "counter"
    assert found["tandem_loss"]["points"] == [[{"split": "train"}, 0.5]]
    assert [{"tandem_run_state": "training"}, 1.0] in found["tandem_run_state"]["points"]
    assert found["tandem_build_info"]["points"][0][0]["version"] == "1"
    ((labels, (bounds, counts, total)),) = found["tandem_step_duration_seconds"]["points"]
    assert labels == {} and len(counts) == len(bounds) + 1
    assert (counts[1], counts[-1], sum(counts), total) == (2, 1, 3, 500.003)
    json.dumps(registry.snapshot())


def test_a_volume_that_hangs_delays_no_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come in the thread that processes messages; without them, a rank would count as hung."""
    is_stuck = threading.Event()
    may_go_on = threading.Event()

    @contextmanager
    def stuck(path: Path) -> Iterator[Any]:
        is_stuck.set()
        assert may_go_on.wait(60)
        with path.open("ab") as file:
            yield file

    monkeypatch.setattr(writing, "appending", stuck)
    files = OtelFiles(tmp_path, Registry().snapshot)
    files.open({"tandem.run": "r"})
    assert is_stuck.wait(60)
    files.started({"tandem.generation": 1})
    files.handle(RunStarted(0, 100, 250))
    files.handle(beat(3, "eval"))
    files.event("rank_killed", {"rank": 1})
    files.ended()
    may_go_on.set()
    files.finish("finished", "", {})
    lines = [json.loads(line) for line in (tmp_path / "otel-spans.jsonl").read_text().splitlines() if line]
    assert [line["is"] for line in lines] == ["launch", *["begin"] * 3, *["end"] * 4]
    assert newest_metrics(tmp_path), "the last ones come after the lines"


def test_secrets_in_headers() -> None:
    environ = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=short1,x-team=0123456789abcdef%2F, tenant=digits",
        "OTEL_EXPORTER_OTLP_LOGS_HEADERS": "authorization=Bearer%20abcdefgh,written: badly",
    }
    secrets = secrets_in(environ)
    for secret in ("short1", "0123456789abcdef%2F", "0123456789abcdef/", "abcdefgh", "written: badly"):
        assert secret not in hide(f"is {secret} here", secrets), secret
    assert hide("task digits", secrets) == "task digits"
