"""Runs that are sent to an OpenTelemetry collector, and are killed in part or as a whole."""

import os
import signal

import pytest
from otel_runs import Sent, only, words_of
from small_runs import Runs, rank_processes

from patience import patient

pytestmark = [pytest.mark.faults, pytest.mark.timeout(400)]
EPOCH = 104  # steps


def test_a_rank_and_the_sending_process_are_killed(runs: Runs, sent: Sent) -> None:
    process = sent.start("--nproc", 2, "--steps", 250)
    first = sent.wait_for_sender()
    sent.until_step(30)
    os.kill(first, signal.SIGKILL)
    second = sent.wait_for_sender(first)
    os.kill(rank_processes(process.pid)["tandem-rank-1"], signal.SIGKILL)
    sent.until_step(150)
    os.kill(second, signal.SIGKILL)
    code, output = runs.processes.wait(process)
    assert code == 0, output
    assert output.count("was killed (signal 9); restarting") == 2
    there = sent.collector
    assert there.last("tandem_global_step") == 250
    assert there.last("tandem_restarts", reason="crash") == 1
    sent.check_tree()
    sent.check_counters()
    (run,) = there.spans("run")
    assert (run.cause, run.is_error, run.attributes["tandem.step"]) == ("finished", False, 250)
    killed, last = sorted(there.spans("generation"), key=lambda each: each.began)
    assert (killed.cause, killed.is_error) == ("rank killed", True)
    assert (last.cause, last.attributes["tandem.generation"]) == ("finished", 2)
    assert killed.ended == pytest.approx(last.began, abs=0.01)
    epochs = sorted(there.spans("epoch"), key=lambda each: each.began)
    assert [each.attributes["tandem.epoch"] for each in epochs if each.parent == last.span][-2:] == [2, 3]
    assert {each.cause for each in epochs if each.parent == killed.span} <= {"finished", "rank killed"}
    assert "rank killed" in {each.cause for each in epochs}
    saved = {each.attributes["tandem.step"] for each in there.spans("save")}
    assert saved >= {25, 50, 75, 100, 125, 150, 175, 200, 225, 250}
    scored = [each.attributes["tandem.step"] for each in there.spans("evaluation")]
    assert set(scored) >= {EPOCH, 2 * EPOCH, 250}
    whole = [each for each in there.spans("evaluation") if each.cause == "finished"]
    assert len(whole) >= 3 and all("tandem.score.accuracy" in each.attributes for each in whole)
    known = {each.span for each in there.spans()}
    texts = {each.name: each for each in there.logs()}
    assert any(text.startswith("finished at step 250") for text in texts)
    warned = next(each for text, each in texts.items() if text.startswith("rank 1 on node 0 was killed"))
    assert warned.message.severity_text == "WARNING" and warned.span == last.span
    assert {each.trace for each in there.logs()} == {run.trace}
    assert {each.span for each in there.logs()} <= known
    about = {"service.name": "tandem", "tandem.run": "run", "tandem.task": "small.py:Small"}
    assert about.items() <= run.resource.items()
    assert len({each.resource["service.instance.id"] for each in there.spans()}) == 1


def test_the_agent_is_killed_and_the_run_continues(runs: Runs, sent: Sent) -> None:
    runs.environment["OTEL_METRIC_EXPORT_INTERVAL"] = "60000"
    runs.environment["OTEL_RESOURCE_ATTRIBUTES"] = "service.instance.id=mine,team=a"
    process = sent.start("--nproc", 1, "--steps", 100_000)
    runs.wait_for_step("run", 50)
    sender = sent.wait_for_sender()
    os.kill(process.pid, signal.SIGKILL)
    runs.until(lambda: not words_of(sender), "end of the sending process")
    last = sent.last_step()
    assert sent.collector.last("tandem_global_step") == last
    first = only(sent.collector.spans("run"))
    assert (first.cause, first.is_error) == ("launch killed", True)
    assert {each.cause for each in sent.collector.spans("generation")} == {"launch killed"}
    process.communicate(timeout=patient(100))

    process = sent.start("--nproc", 1, "--steps", last + 40)
    code, output = runs.processes.wait(process)
    assert code == 0, output
    assert sent.collector.last("tandem_global_step") == last + 40
    second = max(sent.collector.spans("run"), key=lambda each: each.began)
    assert second.cause == "finished" and second.trace != first.trace and second.links == [first.span]
    assert (second.resource["service.instance.id"], second.resource["team"]) == ("mine", "a")
    sent.check_tree()
    sent.check_counters(launches=2)
    restarts = sent.collector.points("tandem_restarts")
    assert len({each.began for each in restarts}) == 1, "the count goes on"
    assert sent.collector.last("tandem_restarts", reason="crash") == 1


def test_a_collector_that_is_down_gets_everything_later(runs: Runs, sent: Sent) -> None:
    runs.environment["OTEL_EXPORTER_OTLP_HEADERS"] = "api-key=notASecretOfAnyone"
    runs.environment["OTEL_EXPORTER_OTLP_TIMEOUT"] = "1"
    sent.collector.answers = lambda path: 503
    process = sent.start("--nproc", 1, "--steps", 100_000)
    runs.wait_for_step("run", 50)
    runs.until(lambda: "does not accept rows" in sent_log(runs), "warning")
    process.send_signal(signal.SIGTERM)
    code, output = runs.processes.wait(process)
    assert code == 143, output
    assert output.count("OpenTelemetry does not accept rows") == 1, output
    assert "to send the rest, run: tandem track" in output and not sent.collector.spans()
    assert "notASecret" not in sent_log(runs) + output
    assert all(headers["api-key"] == "notASecretOfAnyone" for _, _, headers in sent.collector.requests)

    sent.collector.answers = lambda path: 200
    command = [*runs.command("track", "run")[:3], "track", "run", "--tracker", "otel"]
    code, output = runs.processes.run(command, cwd=runs.folder, env=runs.environment)
    assert code == 0 and "records sent" in output, output
    assert only(sent.collector.spans("run")).cause == "stop"
    assert only(sent.collector.spans("generation")).cause == "stop"
    assert sent.collector.last("tandem_global_step") == sent.last_step()
    assert sent.collector.last("tandem_run_state", tandem_run_state="stopped") == 1
    sent.check_tree()
    before = len(sent.collector.requests)
    assert runs.processes.run(command, cwd=runs.folder, env=runs.environment)[0] == 0
    assert len(sent.collector.requests) == before, "all was there"


def sent_log(runs: Runs) -> str:
    return "".join(path.read_text() for path in (runs.folder / "run" / "log").glob("*.log"))
