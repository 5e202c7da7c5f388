"""The report's data and its command line; how it looks is tested in a browser."""

import json
import os
import re
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.cli import run
from tandem.errors import ConfigError
from tandem.report.pages import live_page, report_page
from tandem.report.report import read_run
from tandem.telemetry.journal import Journal


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"task": "digits", "lr": 0.1, "run_dir": "x"}))
    journal = Journal(folder)
    journal.metrics(50, loss=1.0, samples_per_second=10.0, phases={"forward": 2.0, "backward": 3.0})
    journal.metrics(100, loss=0.5, samples_per_second=12.0, phases={"forward": 2.5, "backward": 3.5})
    journal.metrics(100, eval={"accuracy": 0.9, "loss": 0.4})
    journal.event("world", number=1)
    journal.event("world", number=2)
    summary = {"state": "finished", "global_step": 100, "loss": 0.5, "eval": {"accuracy": 0.9, "loss": 0.4}}
    summary |= {"optimizer": "Adam", "lr": 0.003, "schedule": None}
    (folder / "summary.json").write_text(json.dumps({**summary, "world_size": 2, "nodes": 1}))
    (folder / "metrics.prom").write_text('tandem_activity_seconds_total{activity="train"} 8.5\n')
    return folder


def test_a_run_is_read(run_dir: Path) -> None:
    report = read_run(run_dir)
    assert report["name"] == "digits" and report["state"] == "finished"
    assert dict(report["cards"])["restarts"] == 1 and dict(report["cards"])["accuracy"] == 0.9
    assert report["phases"]["forward"] == 4.5 and len(report["points"]) == 3
    assert report["activities"] == [["train", 8.5]]
    assert report["settings"] == {"task": "digits", "lr": 0.1}
    assert report["about"]["settings"][1] == {"name": "lr", "value": 0.1, "default": 0.1, "differs": False}
    assert report["about"]["optimizer"] == "Adam, lr 0.003"
    assert report["reason"] == "" and report["log"] is None


def test_a_run_that_failed_has_its_reason_and_its_log_without_secrets(run_dir: Path) -> None:
    ending = {"state": "failed", "reason": "rank 1 on node 0: no entry for correct-horse"}
    (run_dir / "summary.json").write_text(json.dumps(ending))
    (run_dir / "log").mkdir()
    (run_dir / "log" / "rank-1.log").write_text("at correct-horse\n")
    Journal(run_dir).event("failed", reason="no correct-horse", exit_code=1)
    report = read_run(run_dir, ["correct-horse"])
    assert report["events"][0]["reason"] == "no [hidden]"
    assert report["reason"] == "rank 1 on node 0: no entry for [hidden]"
    assert report["log"] == {"file": "log/rank-1.log", "lines": ["at [hidden]"]}


def test_a_run_without_an_end_is_read_too(run_dir: Path) -> None:
    for name in ("summary.json", "metrics.prom", "events.jsonl"):
        (run_dir / name).unlink()
    report = read_run(run_dir)
    assert report["state"] == "not finished" and report["activities"] == [] and report["ended"] is None


def test_pages_hold_no_address_and_no_open_end() -> None:
    page = report_page({"runs": [{"name": "</script><!--"}]})
    assert page.count(b"</script>") == 2 and b"<!--" not in page
    for each in (page, live_page().html):
        assert b"http://" not in each
        assert re.findall(rb"https://[^ )]*", each) == [b"https://github.com/leeoniya/uPlot"]  # a comment
        assert b"The MIT License (MIT)" in each, "the licence of uPlot travels with it"
        assert b"@" not in each.replace(b"@media", b"")


def test_the_verb(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("report", [str(run_dir)], {}) == 0
    assert (run_dir / "report.html").exists() and "report.html" in capsys.readouterr().out
    output = run_dir / "both.html"
    assert run("report", [str(run_dir), "--compare", str(run_dir), "--output", str(output)], {}) == 0
    assert output.read_bytes().count(b'"name": "digits"') == 2


@pytest.mark.parametrize("arguments", [[], ["--compare"], ["a", "b"], ["a", "--compare"], ["a", "--colour"]])
def test_what_was_not_said_is_asked_for(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="tandem report --help"):
        run("report", arguments, {})


def test_no_device_or_pipe_is_replaced_by_a_report(run_dir: Path, tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (stdout := tmp_path / "stdout").symlink_to("/proc/self/fd/1")  # as /dev/stdout
    for output in (pipe, stdout):
        with pytest.raises(
            ConfigError, match=f"cannot write {output}: it is not a regular file; give --output"
        ):
            run("report", [str(run_dir), "--output", str(output)], {})
    assert pipe.is_fifo() and stdout.is_symlink()


def test_a_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        run("report", [str(tmp_path)], {})


def test_a_broken_run_is_a_line_and_the_others_are_compared(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "secret.json").write_text('{"canary": 1}')
    (tmp_path / "bad" / "config.json").symlink_to(tmp_path / "secret.json")
    (run_dir / "about.json").symlink_to(tmp_path / "secret.json")
    output = tmp_path / "both.html"
    assert run("report", [str(run_dir), "--compare", str(tmp_path / "bad"), "--output", str(output)], {}) == 0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "about.json is a link" in lines[0] and "config.json is a link" in lines[1]
    assert b"canary" not in output.read_bytes() and output.read_bytes().count(b'"name": "digits"') == 1
    with pytest.raises(ConfigError, match=r"is not a run: config\.json is a link"):
        run("report", [str(tmp_path / "bad")], {})


def test_checkpoints_that_a_link_leads_to_are_not_shown(run_dir: Path, tmp_path: Path) -> None:
    CheckpointStore(tmp_path / "other" / "checkpoints").save(7, b"state", {"eval": {"canary": 0.5}})
    (run_dir / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    report = read_run(run_dir)
    assert report["checkpoints"] == []
    assert any("checkpoints is a symbolic link" in each for each in report["problems"])
    for words in (["checkpoints", "ls", str(run_dir)], ["checkpoints", "ls", str(run_dir / "checkpoints")]):
        if words[-1].endswith("digits"):
            with pytest.raises(ConfigError, match="checkpoints is a symbolic link"):
                run(words[0], words[1:], {})
        else:  # as it was typed
            assert run(words[0], words[1:], {}) == 0


def test_a_step_that_a_link_leads_to_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CheckpointStore(tmp_path / "other" / "checkpoints").save(7, b"state", {"eval": {"canary": 0.5}})
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    store.save(5, b"state", {})
    (store.directory / "step-000000007").symlink_to(tmp_path / "other" / "checkpoints" / "step-000000007")
    assert run("checkpoints", ["ls", str(tmp_path / "run")], {}) == 1
    said = capsys.readouterr().out
    assert "canary" not in said and "step-000000007 is a link" in said
    found = store.newest(store.info, lambda *_: None, quarantine=False)
    assert found is not None and found[0] == 5
