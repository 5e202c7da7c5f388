"""What a node's agent shows, while its state folder is full for a moment."""

import logging
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from patience import patient
from tandem import layout
from tandem.config import Settings
from tandem.config.slices import LaunchConfig
from tandem.launch import view
from tandem.platforms.detection import detect
from tandem.run.directory import RunDir
from tandem.signals import StopFlag
from tandem.telemetry import health, metrics
from tandem.telemetry.messages import Sample, Samples

LIMIT_SECONDS = 20.0
SECOND_OF_TWO = LaunchConfig(nodes=2, node_rank=1, master="127.0.0.1:29500")


def until(true: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_SECONDS
    while not true():
        assert time.monotonic() < deadline, "too long"
        time.sleep(0.01)


def test_health_is_written_again_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state_dir, tries = tmp_path / "state", []
    written = health.write_health

    def counted(*arguments: object) -> None:
        tries.append(arguments)
        written(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(health, "write_health", counted)
    (state_dir / layout.HEALTH / "in the way").mkdir(parents=True)
    placement = detect({}, "here", SECOND_OF_TWO)
    with caplog.at_level(logging.WARNING, "tandem"):
        node = view.NodeView(
            RunDir(tmp_path / "run"), Settings(), placement, state_dir, tmp_path / "s", tick_seconds=0.01
        )
        try:
            until(lambda: len(tries) > 3)
            (state_dir / layout.HEALTH / "in the way").rmdir()
            (state_dir / layout.HEALTH).rmdir()
            until(lambda: health.check(state_dir)[0])
        finally:
            node.close()
    warnings = [record for record in caplog.records if "cannot write health" in record.message]
    assert len(warnings) == 1, "said once, not each second"


def test_a_clock_that_is_set_is_no_time_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = detect({}, "here", SECOND_OF_TWO)
    node = view.NodeView(
        RunDir(tmp_path / "run"), Settings(), placement, tmp_path / "state", tmp_path / "scratch"
    )
    right = time.time
    try:
        for ahead in (7200, -7200):
            monkeypatch.setattr(time, "time", lambda ahead=ahead: right() + ahead)
            status = node.status()
            assert status["healthy"], status["health"]
            assert 0 <= status["seconds_since_progress"] < LIMIT_SECONDS  # type: ignore[operator]
    finally:
        node.close()


def test_the_end_of_a_run_shorter_than_a_tick_is_in_its_health(tmp_path: Path) -> None:
    placement = detect({}, "here", SECOND_OF_TWO)
    node = view.NodeView(
        RunDir(tmp_path / "run"), Settings(), placement, tmp_path / "state", tmp_path / "scratch"
    )
    node.ended(0, "")
    node.close()
    assert health.check(tmp_path / "state") == (True, "succeeded at step 0")


@pytest.mark.parametrize(("code", "is_stopped", "state"), [
    (0, False, "succeeded"),
    (143, True, "stopped"),
    (137, True, "stopped"),  # before there was anything to save
    (137, False, "failed"),
    (1, True, "failed"),
    (200, False, "failed"),
])  # fmt: skip
def test_how_a_run_ended_waits_for_the_last_scrape(
    tmp_path: Path, code: int, is_stopped: bool, state: str
) -> None:
    """A planned stop has a state of its own, and is scraped as any other end; the run's name is there."""
    stop = StopFlag()
    settings = Settings().replace(metrics="127.0.0.1:0", metrics_linger=60.0, run_dir=tmp_path / "llm")
    (tmp_path / "llm").mkdir()
    node = view.NodeView(
        RunDir.of(settings), settings, detect({}, "here"), None, tmp_path / "scratch", None, stop
    )
    try:
        assert node._server is not None
        url, seen = f"{node._server.url}/metrics", list[str]()
        asked = threading.Event()

        def scrape() -> None:
            asked.set()
            asks = urllib.request.Request(url, headers={"User-Agent": "Prometheus/3.5.0"})
            with urllib.request.urlopen(asks, timeout=patient(20)) as answer:
                seen.append(answer.read().decode())

        scrape()
        assert 'run="llm"' in seen[0]
        if is_stopped:
            stop.signal_number, stop.at = signal.SIGTERM, time.monotonic()
        node.ended(code, "why")
        asked.clear()
        scraper = threading.Timer(0.3, scrape)
        scraper.start()
        node.linger(stop)
        assert asked.is_set(), "it waited"
        scraper.join(60)
        assert len(seen) == 2 and f'tandem_run_state{{tandem_run_state="{state}"}} 1.0' in seen[1]
        stop.interrupts = 2
        node._server._last_read["/metrics"] = 0.0
        node.linger(stop)  # nobody comes, and a second Ctrl-C does not wait
    finally:
        node.close()


def test_what_ranks_read_from_object_stores_is_in_the_status(tmp_path: Path) -> None:
    node = view.NodeView(RunDir(tmp_path / "run"), Settings(), detect({}, "here", LaunchConfig()), None,
                         tmp_path / "scratch", tick_seconds=0.01)  # fmt: skip
    try:
        assert node.status()["blocks"] == []
        ranks = [metrics.BLOCK_BYTES.inc(5), *(metrics.BLOCKS_AHEAD.set(3, rank=rank) for rank in range(2))]
        node.metrics.apply(ranks)
        node.metrics.apply_node(1, [metrics.BLOCK_BYTES.inc(7)])
        rows = node.status()["blocks"]
        assert isinstance(rows, list)
        assert [(row["node"], row["bytes"], row["ahead"]) for row in rows] == [(0, 5, 6), (1, 7, 0)]
    finally:
        node.close()


def test_the_steps_in_the_memory_of_each_node_are_shown(tmp_path: Path) -> None:
    node = view.NodeView(
        RunDir(tmp_path / "run"), Settings(), detect({}, "here", LaunchConfig(nodes=2, node_rank=0,
        master="127.0.0.1:29500")), None, tmp_path / "scratch", tick_seconds=0.01,
    )  # fmt: skip
    try:
        assert node.status()["snapshots"] == {}
        node.newest_snapshot = lambda: 7
        until(lambda: node.status()["snapshots"] == {"0": 7})
        node.metrics.apply_node(1, [Sample("tandem_snapshot_step", {}, 6.0)])
        assert node.status()["snapshots"] == {"0": 7, "1": 6}
        page = node.metrics.page().decode()
        assert 'tandem_snapshot_step{node="1"} 6.0' in page
        node.metrics.forget_node(1)
        assert node.status()["snapshots"] == {"0": 7}
        assert node.status()["snapshot_interval"] is None
        node.receive(Samples([Sample("tandem_snapshot_interval_seconds", {}, 1.5)]))
        assert node.status()["snapshot_interval"] == 1.5
        assert node.status()["copies"] == {}
        node.newest_copy = lambda: 5
        until(lambda: node.status()["copies"] == {"0": 5})
    finally:
        node.close()
