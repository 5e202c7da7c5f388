"""The buttons that look inside a run, in headless Chromium: also on a phone, in the dark, and for axe."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from browser import DESKTOP, PHASES_MS, PHONE, Browser

from tandem.report.history import History
from tandem.report.inspection import InspectionPaths
from tandem.report.server import MetricsServer
from tandem.run.directory import RunDir
from tandem.telemetry.messages import Point
from tandem.telemetry.registry import Registry

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(200)]
LONG = "/home/someone/" + "a-long-name/" * 30 + "train.py"
SHOWN = "document.querySelector('#inside')?.hidden === false"


def answers(action: str, options: Mapping[str, float]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for rank in range(3):
        main = {"thread": "MainThread", "frames": [(LONG, 40 + rank, "<b>f</b>")]}
        rows.append({"rank": rank, "node": 0, "threads": [main]})
    if action == "profile":
        facts = {"first": 4, "last": 3 + int(options["steps"]), "clock_uncertainty_us": 0.0}
        return {"answers": rows, "file": "trace.json", **facts}
    if action == "memory":
        raise ValueError("the run has no ranks at the moment")
    return {"answers": rows}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetricsServer]:
    history = History(RunDir(tmp_path))
    history.handle(Point(10, 1.0, {"loss": 1.0, "samples_per_second": 1000.0, "phases": PHASES_MS}))
    status = {"run": "r", "task": "t", "state": "training", "platform": "none", "nodes": 1, "step": 7}
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: {**status, **history.now()}, history.curves)
    # As with a token, which a page in a browser would ask for.
    server.inspection = InspectionPaths(has_token=True)
    server.inspection.ask = answers
    yield server
    server.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", [PHONE, DESKTOP])
def test_the_buttons_show_what_the_ranks_answer(
    browser: Browser, server: MetricsServer, size: tuple[int, int], dark: bool
) -> None:
    browser.open(f"{server.url}/", size, dark)
    browser.wait_for(SHOWN)
    assert browser.run("document.querySelector('#trace').hidden && !document.querySelector('#answer pre')")
    for action, wanted in (("stacks", ":41 in <b>f</b>"), ("profile", "steps 4 to 9 of 3 ranks")):
        browser.run("document.querySelector('#steps').value = 6")
        browser.run(f"document.querySelector('[data-action={action}]').click()")
        browser.wait_for(f"document.querySelector('#answer').textContent.includes({wanted!r})")
    assert not browser.run("document.querySelector('#trace').hidden")
    browser.wait_for("!document.querySelector('#inside button').disabled")
    assert browser.run("document.querySelectorAll('#answer b').length") == 0, "text is text"
    assert not browser.is_too_wide()
    assert browser.complaints == []


def test_a_refusal_is_said_beside_the_buttons(browser: Browser, server: MetricsServer) -> None:
    browser.open(f"{server.url}/")
    browser.wait_for(SHOWN)
    browser.run("document.querySelector('[data-action=memory]').click()")
    browser.wait_for("document.querySelector('#asked').textContent.includes('has no ranks at the moment')")


@pytest.mark.parametrize("dark", [False, True])
def test_axe_finds_no_serious_fault_in_them(
    browser: Browser, axe: str, server: MetricsServer, dark: bool
) -> None:
    for size in (DESKTOP, PHONE):
        browser.open(f"{server.url}/", size, dark)
        browser.wait_for(SHOWN)
        browser.run("document.querySelector('[data-action=stacks]').click()")
        browser.wait_for("!!document.querySelector('#answer pre')")
        assert browser.faults(axe) == []


def test_without_a_token_there_are_no_buttons(browser: Browser, server: MetricsServer) -> None:
    server.inspection = InspectionPaths(has_token=False)
    browser.open(f"{server.url}/")
    browser.wait_for("document.querySelector('h1')?.textContent == 'r'")
    assert browser.run("document.querySelector('#inside').hidden")
