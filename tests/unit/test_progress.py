import io
import logging
import re
import sys
import types
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.log import setup
from tandem.telemetry.displays import EventWriter, Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def report(progress: Progress, loss: float = 0.5) -> None:
    progress.report(7, epoch=1, loss=loss, samples_per_second=1234.5)


def test_a_terminal_gets_a_bar() -> None:
    stream = Terminal()
    progress = Progress(10, start_step=5, stream=stream)
    report(progress, float("nan"))
    progress.advance(10)
    progress.close()
    progress.close()
    assert "10/10" in stream.getvalue() and "loss nan" in stream.getvalue()


def test_a_bar_makes_way_for_lines_of_the_log_and_the_file_has_them_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    logger = setup(tmp_path / "rank-0.log", 0, 0, to_terminal=True, json_lines=False)
    try:
        progress = Progress(10)
        report(progress)
        progress.note("evaluation after step 7")
        logger.warning("a save has failed")
        progress.close()
        logger.info("the end")
    finally:
        setup(None, None, 0, False, False)
    shown = re.sub(r"\x1b\[[0-9;]*[mK]", "", stream.getvalue())
    lines = [line.rpartition("\r")[2] for line in shown.splitlines()]
    assert [line.partition(" | ")[2] for line in lines if " rank 0 | " in line] == (
        written := ["evaluation after step 7", "warning: a save has failed", "the end"]
    )
    assert all("step/s" not in line for line in lines if " rank 0 | " in line)
    file = (tmp_path / "rank-0.log").read_text().splitlines()
    assert [line.partition(" | ")[2] for line in file] == written


@pytest.mark.parametrize(("mode", "stream"), [("auto", io.StringIO()), ("off", Terminal())])
def test_without_a_bar_a_line_is_logged(
    mode: str, stream: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem"):
        report(Progress(10, mode=mode, stream=stream))  # type: ignore[arg-type]
    assert caplog.messages == ["step 7 of 10 (epoch 1): loss 0.5000, 1,234 samples/s"]
    assert stream.getvalue() == ""


def test_tensorboard_missing_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match="pip install") as caught:
        EventWriter(tmp_path)
    assert "\n" not in str(caught.value)


def test_tensorboard_failures_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class FullDisk:
        def __init__(self, log_dir: str, purge_step: int | None) -> None:
            assert purge_step == 3

        def add_scalar(self, name: str, value: float, step: int) -> None:
            raise OSError("no space")

        flush = close = lambda self: None

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = FullDisk  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    writer = EventWriter(tmp_path, purge_step=3)
    writer.scalars(3, {"loss": 1.0})
    writer.scalars(4, {"loss": 1.0})
    writer.close()
    assert len(caplog.records) == 1
