"""How a person reads the pages: values by mouse, finger and keys, smoothing, scales, words, accessibility."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHASES_MS, PHONE, Browser

from tandem.config import Settings
from tandem.report.about import About
from tandem.report.history import History
from tandem.report.report import make_report
from tandem.report.server import MetricsServer
from tandem.run.directory import RunDir
from tandem.telemetry.journal import Journal
from tandem.telemetry.messages import Ranks
from tandem.telemetry.registry import Registry

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(300)]
LEGENDS = "[...document.querySelectorAll('.curves section')].map(each => each.textContent)"
FAILED = {"state": "failed", "exit_code": 1, "reason": "rank 1 on node 0: KeyError: 7"}
EVENTS: tuple[dict[str, object], ...] = (
    {"kind": "world", "number": 1, "world_size": 2, "nodes": 1},
    {"kind": "training", "step": 1},
    *({"kind": "checkpoint", "step": step, "seconds": 0.02, "bytes": 4096} for step in (100, 200, 300)),
    {
        "kind": "straggler",
        "rank": 1,
        "node": 0,
        "phase": "forward",
        "own_seconds": 0.03,
        "median_seconds": 0.02,
    },
    {"kind": "rank_killed", "rank": 1, "node": 0, "signal": "SIGKILL", "seconds": 0.5, "steps_lost": 0},
    {"kind": "recovered", "cause": "node 1 was lost", "seconds": 1.5, "steps_lost": 2},
    {"kind": "hang", "rank": 0, "node": 0, "phase": "train", "step": 350, "seconds": 10.0},
    {"kind": "a_new_kind", "words": [1, 2]},
    {"kind": "fallback", "step": 300, "problem": "state.pt: SHA-256 differs"},
)


def loss_at(step: int) -> float:
    return 500 / step**1.05 + 0.2 * math.sin(step)


def journal(folder: Path, grad_norm: bool = True) -> None:
    """A run of 600 steps whose loss falls from 100 to below 1, with all that a run can have."""
    written = Journal(folder)
    for step in range(10, 610, 10):
        more = {"grad_norm": 2 + math.sin(step)} if grad_norm else {}
        numbers = {"learning_rate": 0.1 / step, "samples_per_second": 1000.0 + step, "phases": PHASES_MS}
        written.metrics(step, loss=loss_at(step), scores={"accuracy": step / 700}, **numbers, **more)
    written.metrics(300, eval={"loss": 1.5, "accuracy": 0.5})
    written.metrics(600, eval={"loss": 0.75, "accuracy": 0.875})
    for event in EVENTS:
        written.event(str(event["kind"]), **{name: value for name, value in event.items() if name != "kind"})
    (folder / "config.json").write_text(
        json.dumps(Settings().to_dict() | {"lr": 0.5, "task": "folder/mine.py:Mine"})
    )
    (folder / "log").mkdir()
    (folder / "log" / "rank-0.log").write_text("fine\n")
    (folder / "log" / "rank-1.log").write_text("HF_TOKEN=hf_0123456789abcdefghij\nKeyError: 7\n")
    About(folder).write(["NVIDIA H200"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    journal(folder)
    return folder


@pytest.fixture
def ending() -> dict[str, object]:
    """What the served run says of its end; filled by the tests that end it."""
    return {}


@pytest.fixture
def url(run_dir: Path, ending: dict[str, object]) -> Iterator[str]:
    history, about = History(RunDir(run_dir)), About(run_dir)
    rows = [{"rank": rank, "node": 0, "own_ms": 20.0 + 10 * rank, "straggler": rank == 1,
             "phases_ms": {"forward": 12.0, "backward": 8.0 + rank}} for rank in range(2)]  # fmt: skip
    history.handle(Ranks(rows, "straggler: rank 1 on node 0"))
    status: dict[str, object] = {
        "run": "mine", "task": "mine", "state": "training", "platform": "none", "nodes": 1, "step": 600,
        "steps_planned": 1200, "loss": 0.7, "samples_per_second": 1600.0, "restarts": 2, "seconds_left": 75.0,
        "healthy": True,
    }  # fmt: skip

    def now() -> dict[str, object]:
        return {**status, "time": time.time(), "ending": ending or None, **history.now()}

    server = MetricsServer(
        Registry(),
        "127.0.0.1",
        0,
        now,
        history.curves,
        None,
        about.read,
        lambda: about.log(str(ending.get("reason"))),
    )
    yield f"{server.url}/"
    server.close()


def open_live(browser: Browser, url: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
    browser.open(url, size, dark)
    browser.wait_for("document.querySelectorAll('canvas').length >= 5 && !!document.querySelector('dl')")


def legend(browser: Browser, title: str) -> str:
    """What stands in the chart of this title."""
    return str(next(text for text in browser.run(LEGENDS) if text.startswith(title)))


def test_the_first_look_says_how_it_stands(browser: Browser, url: str) -> None:
    open_live(browser, url)
    cards = browser.run("[...document.querySelectorAll('.card')].map(each => each.textContent)")
    for said in ("step600of 1,200, 50.0 %", "training loss0.7", "accuracy, evaluation0.875", "restarts2"):
        assert said in cards
    assert any(card.startswith("time left75 s") for card in cards)
    trouble = browser.run("document.querySelector('#trouble').textContent")
    assert trouble.startswith("The checkpoint of step 300 cannot be used (state.pt: SHA-256 differs)")
    titles = browser.run("[...document.querySelectorAll('.curves h2')].map(each => each.textContent)")
    assert titles == ["Loss", "accuracy", "Samples per second", "Learning rate", "Gradient norm"]
    assert legend(browser, "Loss") == f"Losstrain {loss_at(600):.4g}eval 0.75newest"
    assert browser.complaints == []


def test_values_are_read_by_mouse_keys_and_finger(browser: Browser, url: str) -> None:
    open_live(browser, url)
    browser.hover(".curves section:nth-child(2) .u-over", 0.5)
    browser.wait_for(f"{LEGENDS}[1].includes('step 3')")
    assert "eval 0.5" in legend(browser, "accuracy")
    assert "step 3" in legend(browser, "Learning rate"), "all charts show the same step"
    browser.hover("h1", 0.5)
    browser.run("document.querySelector('.plot').focus()")
    browser.press("Home")
    browser.press("ArrowRight")
    assert "step 20" in legend(browser, "Loss")
    told = browser.run("document.querySelector('.plot').getAttribute('aria-valuetext')")
    assert told.startswith("step 20: train ") and told.endswith("eval 1.5")
    assert browser.run("document.activeElement.getAttribute('role')") == "slider"
    browser.press("End")
    assert "step 600" in legend(browser, "Loss")
    browser.press("Escape")
    assert legend(browser, "Loss").endswith("newest")
    open_live(browser, url, PHONE)
    browser.call("Emulation.setTouchEmulationEnabled", enabled=True)
    browser.swipe(".plot .u-over", 0.9, 0.02)
    browser.wait_for(f"/step [12]0$/.test({LEGENDS}[0])")
    browser.call("Emulation.setTouchEmulationEnabled", enabled=False)


def chosen(browser: Browser, control: str, value: str) -> None:
    browser.run(
        f"(() => {{const it = document.querySelector('#{control}'); it.value = '{value}';"
        "for (const kind of ['input', 'change']) it.dispatchEvent(new Event(kind))})()"
    )


def test_curves_are_smoothed_and_scaled(browser: Browser, url: str) -> None:
    open_live(browser, url)
    titles = ("Loss", "accuracy", "Gradient norm")
    loss, accuracy, norm = (f"board.charts.get('{title}').plot" for title in titles)
    assert browser.run(f"[{loss}, {accuracy}].map(plot => plot.scales.y.distr)") == [3, 1], "100 to 1: powers"
    assert {"1", "10", "100"} <= set(browser.run(f"{loss}.axes[1]._values"))
    before = browser.run(f"{norm}.data[1]")
    chosen(browser, "smoothing", "0.9")
    rough, smooth = browser.run(f"[{norm}.data[1], {norm}.data[2]]")
    assert rough == before and max(smooth[20:]) - min(smooth[20:]) < 0.5 * (max(rough) - min(rough))
    chosen(browser, "choose-scale", "linear")
    assert browser.run(f"{loss}.scales.y.distr") == 1
    chosen(browser, "choose-scale", "log")
    assert browser.run(f"{accuracy}.scales.y.distr") == 3
    chosen(browser, "choose-x", "time")
    assert browser.run(f"{loss}.data[0][0]") == 0
    assert browser.complaints == []


def test_who_has_zoomed_in_stays_there(browser: Browser, url: str) -> None:
    open_live(browser, url)
    browser.run("board.charts.get('Loss').plot.setScale('x', {min: 100, max: 200})")
    browser.run("board.show(board.specs)")
    assert browser.run("board.charts.get('Loss').plot.scales.x.max") == 200


def test_events_are_sentences_and_noise_is_folded(browser: Browser, url: str) -> None:
    open_live(browser, url)
    said = browser.run(
        "[...document.querySelectorAll('#events > ol > li')].map(each => each.lastChild.innerText)"
    )
    assert said[0].startswith("The checkpoint of step 300 cannot be used")
    assert said[1] == "a new kind: words [1,2]"
    assert said[2] == "Rank 0 on node 0 has hung in train at step 350 for 10 s; restarting all ranks"
    assert said[3] == "Training again after 1.5 s, 2 steps lost (node 1 was lost)"
    assert said[4] == "Rank 1 on node 0 was killed (SIGKILL); training again after 500 ms, 0 steps lost"
    assert said[5].startswith("Rank 1 on node 0 is a straggler: it needs 30 ms per step (median 20 ms)")
    assert said[6] == "3 checkpoints saved, the newest of step 300; 2 routine events more"
    assert len(said) == 7
    browser.run("document.querySelector('#events details').open = true")
    time.sleep(0.1)  # its event
    browser.run("whenNew($('events'), [{time: 1, kind: 'world', number: 2}, ...[]], eventList)")
    assert browser.run("document.querySelectorAll('#events li').length") == 1


def test_what_is_known_of_the_run_is_shown(browser: Browser, url: str) -> None:
    open_live(browser, url)
    browser.wait_for("document.querySelectorAll('#settings tbody tr').length == 2")
    told = browser.run("document.querySelector('#settings').innerText")
    assert "folder/mine.py:Mine" in told and "lr" in told and "momentum" not in told
    browser.run("document.querySelector('#settings details').open = true")
    browser.wait_for("document.querySelector('#settings').innerText.includes('momentum')")
    about = browser.run("document.querySelector('#about').innerText")
    for word in ("command", "torch", "Python", "1 x NVIDIA H200", "cores"):
        assert word in about
    assert browser.run("document.querySelector('#lines').textContent") == ""
    browser.run("document.querySelector('#log').open = true")
    browser.wait_for("document.querySelector('pre')?.textContent == 'fine'")


def test_a_failed_run_says_why_and_shows_its_ranks_log(
    browser: Browser, url: str, ending: dict[str, object]
) -> None:
    ending.update(FAILED)
    open_live(browser, url)
    browser.wait_for("document.querySelector('pre')?.textContent.endsWith('KeyError: 7')")
    assert "hf_0123" not in browser.run("document.body.textContent")
    assert "log/rank-1.log" in browser.run("document.querySelector('#lines').textContent")
    note = browser.run("document.querySelector('#note').textContent")
    assert note.startswith("The run has failed at step 600: rank 1 on node 0: KeyError: 7 (exit code 1)")
    assert browser.run("document.querySelector('#trouble').textContent") == ""


def test_a_chart_that_one_run_has_alone_says_so(browser: Browser, run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    journal(tmp_path / "other", grad_norm=False)
    (tmp_path / "two.html").write_bytes(make_report([run_dir, tmp_path / "other"]))
    browser.open((tmp_path / "two.html").as_uri())
    browser.wait_for("document.querySelectorAll('canvas').length >= 5")
    notes = browser.run("[...document.querySelectorAll('.curves h2')].map(each => each.textContent)")
    assert "Gradient norm not in other" in notes
    assert len([note for note in notes if "not in" in note]) == 1
    assert browser.complaints == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("page", ["training", "failed", "report", "comparison"])
def test_axe_finds_no_serious_fault(
    browser: Browser, axe: str, url: str, ending: dict[str, object], run_dir: Path, page: str, dark: bool
) -> None:
    if page in ("training", "failed"):
        ending.update(FAILED if page == "failed" else {})
    else:
        (run_dir / "summary.json").write_text(json.dumps({**FAILED, "global_step": 600, "world_size": 2}))
        url = (run_dir / "report.html").as_uri()
        (run_dir / "report.html").write_bytes(make_report([run_dir] * (1 if page == "report" else 2)))
    for size in (DESKTOP, PHONE):
        browser.open(url, size, dark)
        browser.wait_for("document.querySelectorAll('canvas').length >= 5")
        browser.run("document.querySelectorAll('details').forEach(each => { each.open = true; })")
        if page == "failed":
            browser.wait_for("!!document.querySelector('pre')")
        elif page == "training":
            browser.wait_for("!!document.querySelector('dl')")
        assert browser.faults(axe) == []
        assert not browser.is_too_wide()
    assert browser.complaints == []


def test_axe_would_find_one(browser: Browser, axe: str, tmp_path: Path) -> None:
    (tmp_path / "bad.html").write_text(
        "<html lang=en><title>a</title><main><img src='data:,'><button></button></main>"
    )
    browser.open((tmp_path / "bad.html").as_uri())
    browser.wait_for("!!document.querySelector('button')")
    found: Any = browser.faults(axe)
    assert len(found) == 2
