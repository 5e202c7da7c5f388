"""The live page and the report in headless Chromium."""

import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHASES_MS, PHONE, Browser

from patience import patient
from prometheus import TASK, until
from tandem.report.goodput import time_of
from tandem.report.history import History, block_reads
from tandem.report.report import write_report
from tandem.report.server import MetricsServer
from tandem.run.directory import RunDir
from tandem.telemetry import metrics
from tandem.telemetry.ledger import Cost, Ledger
from tandem.telemetry.messages import Event, Point, Ranks
from tandem.telemetry.registry import Registry

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(300)]
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
TIME = Ledger({"steps": 60.0, "redone": 10.0, "start": 0.0, "away": 30.0}, {SCRIPT: Cost(2, 40.0)})


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[MetricsServer]:
    """A server whose run has script in every text that a task or a person can choose."""
    history = History(RunDir(tmp_path))
    for step in range(10, 2000, 10):
        numbers = {"loss": 100 / step, "samples_per_second": 1000.0, "phases": PHASES_MS}
        history.handle(Point(step, 1.0, numbers))
    history.handle(Point(1990, 1.0, {"eval": {"loss": "NaN", SCRIPT: 0.5}}))
    history.handle(Event(SCRIPT, time.time(), {SCRIPT: SCRIPT, "step": 3}))
    rows = [
        {"rank": rank, "node": rank // 8, "own_ms": 20.0 + rank, "straggler": rank == 63,
         "phases_ms": {"forward": 12.0, "backward": 8.0 + rank}}
        for rank in range(64)
    ]  # fmt: skip
    history.handle(Ranks(rows, SCRIPT))
    status = {"run": SCRIPT, "task": SCRIPT, "state": "training", "platform": SCRIPT, "nodes": 8, "step": 7,
              "steps_planned": 100, "loss": "NaN", "samples_per_second": 5, "restarts": 1, "time": 1e9,
              "seconds_left": None, "blocks": block_reads(read_by_two_nodes()),
              "goodput": time_of(TIME)}  # fmt: skip
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: {**status, **history.now()}, history.curves)
    yield server
    server.close()


def read_by_two_nodes() -> Registry:
    registry = Registry()
    registry.apply([
        metrics.BLOCK_REQUESTS.inc(40, outcome="ok"), metrics.BLOCK_REQUESTS.inc(3, outcome="retried"),
        metrics.BLOCK_REQUESTS.inc(2, outcome="damaged"), metrics.BLOCK_BYTES.inc(3 * 2**20),
        metrics.BLOCK_NEEDED_BYTES.inc(2 * 2**20), metrics.BLOCK_WAIT_SECONDS.inc(1.5),
        metrics.BLOCKS_AHEAD.set(7, rank=0), metrics.BLOCKS_AHEAD.set(4, rank=1),
        metrics.BLOCK_CACHE_BYTES.set(2**30), metrics.BLOCK_CACHE_LIMIT_BYTES.set(4 * 2**30),
    ])  # fmt: skip
    registry.apply_node(1, [metrics.BLOCK_BYTES.inc(2**20)])
    return registry


def test_what_is_read_from_object_stores_is_a_row_for_each_node(
    browser: Browser, hostile: MetricsServer
) -> None:
    browser.open(f"{hostile.url}/", DESKTOP)
    browser.wait_for("document.querySelectorAll('#blocks tbody tr').length == 2")
    rows = "[...document.querySelectorAll('#blocks tbody tr')]"
    first, second = browser.run(f"{rows}.map(row => [...row.children].map(cell => cell.textContent))")
    assert first == ["0", "3 MiB", "1.5", "40", "5", "0", "1.5 s", "11", "0", "1 GiB of 4 GiB"]
    assert second[:3] == ["1", "1 MiB", "–"], "nothing was needed so far"
    assert browser.complaints == []


def test_where_the_time_of_all_launches_went(browser: Browser, hostile: MetricsServer) -> None:
    browser.open(f"{hostile.url}/", DESKTOP)
    browser.wait_for("document.querySelectorAll('#time table').length == 2")
    rows = browser.run(
        "[...document.querySelectorAll('#time tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )
    assert rows == [
        ["steps that count", "60 s", "60.0 %"],
        ["steps repeated or cut short", "10 s", "10.0 %"],
        ["no launch was running", "30 s", "30.0 %"],
        [SCRIPT, "2", "40 s", "40.0 %"],
    ]
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_script_in_names_is_text_and_the_page_fits(
    browser: Browser, hostile: MetricsServer, size: tuple[int, int], dark: bool
) -> None:
    browser.open(f"{hostile.url}/", size, dark)
    browser.wait_for(
        "document.querySelectorAll('#ranks tbody tr').length == 64 && !!document.querySelector('canvas')"
    )
    assert browser.run("document.querySelector('h1').textContent") == SCRIPT
    assert browser.run("typeof window.hacked") == "undefined"
    assert browser.run("document.querySelectorAll('main script, main img').length") == 0
    assert not browser.is_too_wide()
    lightness = browser.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)[0]")
    assert (lightness < 60) == dark
    assert browser.foreign_requests(hostile.url) == []
    assert browser.complaints == []


def test_without_object_stores_the_page_has_no_such_table(browser: Browser, tmp_path: Path) -> None:
    history = History(RunDir(tmp_path))
    status = {"run": "digits", "task": "digits", "state": "training", "nodes": 1, "step": 7}
    status["blocks"] = block_reads(Registry())
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: {**status, **history.now()}, history.curves)
    try:
        browser.open(f"{server.url}/")
        browser.wait_for("document.querySelector('#state')?.textContent == 'training'")
        assert browser.run("document.querySelector('#blocks').hidden")
        assert browser.run("document.querySelector('#time').hidden")
    finally:
        server.close()


def test_the_last_state_stays_when_nobody_answers(browser: Browser, hostile: MetricsServer) -> None:
    browser.open(f"{hostile.url}/")
    browser.wait_for("document.querySelectorAll('#ranks tbody tr').length == 64")
    hostile.close()
    browser.wait_for("document.querySelector('#note').textContent.startsWith('The run does not answer')")
    assert browser.run("document.querySelectorAll('#ranks tbody tr').length") == 64


@pytest.mark.core
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ({"state": "finished", "exit_code": 0, "reason": ""}, "The run has finished at step 7."),
        (
            {"state": "stopped", "exit_code": 143, "reason": ""},
            "The run has stopped and saved at step 7.",
        ),
        (
            {"state": "failed", "exit_code": 1, "reason": SCRIPT},
            f"The run has failed at step 7: {SCRIPT} (exit code 1).",
        ),
    ],
)
def test_the_end_of_a_run_is_shown_and_the_page_rests(
    browser: Browser, tmp_path: Path, ending: dict[str, object], said: str
) -> None:
    status: dict[str, object] = {"run": "digits", "task": "digits", "platform": "none", "nodes": 1, "step": 7}
    asked, history = list[int](), History(RunDir(tmp_path))

    def now() -> dict[str, object]:
        asked.append(1)
        end = ending if len(asked) > 1 else None
        return {**status, **history.now(), "state": "failed", "ending": end}

    server = MetricsServer(Registry(), "127.0.0.1", 0, now, history.curves)
    try:
        browser.open(f"{server.url}/")
        browser.wait_for("document.querySelector('#note')?.textContent.startsWith('The run has')")
        assert browser.run("document.querySelector('#note').textContent").startswith(said)
        assert browser.run("document.querySelector('#state').textContent") == ending["state"]
        assert browser.run("window.hacked") is None
        assert len(asked) == 2
    finally:
        server.close()


def test_a_page_hears_of_the_end_though_the_server_goes_at_once(browser: Browser, tmp_path: Path) -> None:
    """Its questions come every two seconds, and later on a busy host: it is told on a connection it holds."""
    status: dict[str, object] = {"run": "digits", "task": "digits", "platform": "none", "nodes": 1, "step": 7}
    history, registry = History(RunDir(tmp_path)), Registry()
    server = MetricsServer(
        registry, "127.0.0.1", 0, lambda: {**status, **history.now()}, history.curves,
        log=lambda: {"file": "log/rank-1.log", "lines": ["KeyError: 7"]},
    )  # fmt: skip
    try:
        browser.open(f"{server.url}/")
        until(lambda: server._held == 1, "a page that waits")
        history.handle(Point(7, 1.0, {"loss": 0.25}))
        status |= {"state": "failed", "ending": {"state": "failed", "exit_code": 1, "reason": "no 7"}}
        registry.apply([metrics.RUN_STATE.enter("failed")])
        server.linger(patient(60))
    finally:
        server.close()
    browser.wait_for("document.querySelector('#note').textContent.includes('failed at step 7: no 7')")
    assert browser.run("document.querySelector('pre').textContent") == "KeyError: 7"
    assert "train 0.25" in browser.run("document.querySelector('.legend').textContent")
    time.sleep(2.5)  # another question would be heard of
    assert browser.complaints == []


def test_a_slowed_run_is_shown_with_its_straggler_and_reported(
    browser: Browser, tmp_path: Path, processes: Any, keep: Any
) -> None:
    more = {"nproc": 2, "steps": 400}
    run, url = start(processes, tmp_path, {"slow-rank": 2}, **more)
    browser.open(url, DESKTOP)
    browser.wait_for("document.querySelector('tr.straggler .who')?.textContent == '2'", 180)
    browser.wait_for("document.querySelector('#straggler').textContent.includes('rank 2 on node 1')", 180)
    browser.wait_for("document.querySelectorAll('#checkpoints tbody tr').length >= 2")
    browser.wait_for("document.querySelector('#cards').textContent.includes('on nodes 0, 1')")
    assert browser.run("document.querySelector('h1').textContent") == "run"
    assert browser.foreign_requests(url) == []
    assert browser.complaints == []
    keep("live-desktop.png")
    browser.open(url, PHONE, dark=True)
    browser.wait_for("!!document.querySelector('tr.straggler')")
    assert not browser.is_too_wide()
    keep("live-phone.png")
    browser.resize(DESKTOP)  # the page that is open hears of the end; one opened now might come too late
    browser.wait_for("document.querySelector('#state')?.textContent == 'finished'", 180)
    browser.wait_for("document.querySelector('canvas').clientWidth > 300")
    keep("finished-dark.png")
    code, output = processes.wait(run)
    assert code == 0, output
    said = json.loads((tmp_path / "run" / "about.json").read_text())
    assert said["command"].startswith("tandem launch --nodes 2 --task slow.py:Slow"), "as it was typed"
    assert "--node-rank" not in said["command"] and said["folder"] == str(tmp_path)

    shutil.copytree(tmp_path / "run", tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "config.json").read_text())
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings | {"lr": 0.5, "log_format": SCRIPT}))
    write_report([tmp_path / "run"], tmp_path / "one.html")
    write_report([tmp_path / "run", tmp_path / "other"], tmp_path / "two.html")
    browser.forget()
    for name in ("one.html", "two.html"):
        browser.open((tmp_path / name).as_uri(), PHONE)
        browser.wait_for("document.querySelectorAll('canvas').length >= 3")
        assert not browser.is_too_wide()
    assert "0.5" in browser.run("document.body.textContent")
    assert browser.run("typeof window.hacked") == "undefined"
    assert [each for each in browser.requests if not each.startswith(("file:", "data:"))] == []
    assert browser.complaints == []
    browser.open((tmp_path / "one.html").as_uri(), DESKTOP)
    browser.wait_for("document.querySelectorAll('canvas').length >= 3")
    keep("report.png")
    browser.open((tmp_path / "one.html").as_uri(), DESKTOP, dark=True)
    browser.wait_for("document.querySelectorAll('canvas').length >= 3")
    keep("report-dark.png")
    browser.open((tmp_path / "one.html").as_uri(), PHONE, dark=True)
    browser.wait_for("document.querySelectorAll('canvas').length >= 3")
    keep("report-phone.png")


def test_a_run_that_fails_is_shown_with_its_reason_and_its_log(
    browser: Browser, tmp_path: Path, processes: Any, keep: Any
) -> None:
    run, url = start(processes, tmp_path, {"knobs": tmp_path}, steps=4000)
    browser.open(url, DESKTOP)
    browser.wait_for("Number(document.querySelector('#cards b')?.textContent.replace(',', '')) > 200", 180)
    (tmp_path / "nan").touch()
    browser.wait_for("document.querySelector('#state')?.textContent == 'failed'", 180)
    browser.wait_for("document.querySelector('pre')?.textContent.includes('finite')")
    assert "finite" in browser.run("document.querySelector('#note').textContent")
    assert browser.complaints == []
    keep("failed.png")
    browser.resize(PHONE)
    browser.wait_for("document.querySelector('canvas').clientWidth < 390")
    assert not browser.is_too_wide()
    keep("failed-phone.png")
    code, _ = processes.wait(run)
    assert code == 1
    write_report([tmp_path / "run"], tmp_path / "failed.html")
    browser.forget()
    browser.open((tmp_path / "failed.html").as_uri(), DESKTOP)
    browser.wait_for("document.querySelectorAll('canvas').length >= 3")
    assert "failed" in browser.run("document.querySelector('.state').textContent")
    assert "finite" in browser.run("document.querySelector('pre').textContent")
    heads = "[...document.querySelectorAll('details[open] > summary')].map(each => each.textContent)"
    assert "The end of the log" in browser.run(heads), "a fold without a head is called Details by browsers"
    assert not browser.is_too_wide()
    assert browser.complaints == []
    keep("report-failed.png")


def start(processes: Any, folder: Path, fields: dict[str, object], **more: object) -> tuple[Any, str]:
    """A run of TASK on two nodes, and where its page is."""
    (folder / "slow.py").write_text(TASK)
    flags: dict[str, object] = {
        "nodes": 2, "task": "slow.py:Slow", "run-dir": "run", "batch-size": 24, "log-every": 20,
        "eval-every": 50, "checkpoint-every": 80, "clip-norm": 1, "metrics": 0, "metrics-linger": 15,
        **more,
    }  # fmt: skip
    flags |= {f"task.{name}": value for name, value in fields.items()}
    command = [sys.executable, "-m", "tandem", "launch"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    run = processes.start(command, cwd=folder, env=environment)
    return run, until(lambda: _address(folder / "run" / "log" / "node-0.log"), "address in the log", 120)


def _address(path: Path) -> str | None:
    text = path.read_text() if path.exists() else ""
    return text.partition("live page at ")[2].partition(",")[0] or None
