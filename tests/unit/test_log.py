"""One logger, two forms, a file that is only ever appended to."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.errors import ConfigError
from tandem.log import setup
from tandem.telemetry.clock import Clock


@pytest.fixture(autouse=True)
def quiet_afterwards() -> Iterator[None]:
    yield
    setup(None, None, 0, to_terminal=False, json_lines=False)


def test_text_line_names_the_rank(tmp_path: Path) -> None:
    path = tmp_path / "log" / "rank-2.log"
    setup(path, 2, 1, to_terminal=False, json_lines=False).info("resumed from step %d", 500)
    assert re.fullmatch(r"\d\d:\d\d:\d\d rank 2 \| resumed from step 500\n", path.read_text())


def test_agent_lines_name_the_node_and_other_levels_are_named(tmp_path: Path) -> None:
    logger = setup(tmp_path / "agent.log", None, 3, to_terminal=False, json_lines=False)
    logger.debug("not shown")
    logger.warning("port 19469 is busy")
    line = (tmp_path / "agent.log").read_text()
    assert line.endswith(" node 3 | warning: port 19469 is busy\n")
    assert line.count("\n") == 1


def test_a_detail_is_in_the_file_and_not_on_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, detail = tmp_path / "rank-0.log", {"detail": "[/gloo/pair.cc:545] Read error"}
    setup(path, 0, 0, to_terminal=True, json_lines=False).error("lost the other ranks", extra=detail)
    assert path.read_text().endswith("error: lost the other ranks: [/gloo/pair.cc:545] Read error\n")
    assert capsys.readouterr().err.endswith("error: lost the other ranks\n")
    setup(None, 1, 0, to_terminal=True, json_lines=False).error("lost the other ranks", extra=detail)
    assert "Read error" in capsys.readouterr().err, "there is no file"
    setup(path, 0, 0, to_terminal=True, json_lines=True).error("lost the other ranks", extra=detail)
    assert json.loads(capsys.readouterr().err)["detail"] == detail["detail"], "who collects has all of it"


def test_json_line_has_extra_fields_and_stays_one_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    logger = setup(path, 0, 0, to_terminal=False, json_lines=True)
    try:
        raise OSError("disk\nfull")
    except OSError:
        logger.exception("save failed\nagain", extra={"step": 7, "path": tmp_path})
    (line,) = path.read_text().splitlines()
    record = json.loads(line)
    assert list(record)[:6] == ["time", "level", "rank", "node", "step", "message"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record["time"])
    assert (record["level"], record["rank"], record["node"]) == ("error", 0, 0)
    assert record["message"] == "save failed\nagain"
    assert record["step"] == 7 and record["path"] == str(tmp_path)
    assert "OSError" in record["exception"]
    assert set(record) == {"time", "level", "rank", "node", "message", "exception", "step", "path"}


def test_a_table_is_lines_for_people_and_an_object_for_collectors(tmp_path: Path) -> None:
    table = {"steps": "500", "a step": "forward 40%"}
    for json_lines in (False, True):
        path = tmp_path / str(json_lines)
        setup(path, 0, 0, to_terminal=False, json_lines=json_lines).info("the end", extra={"table": table})
    people, collectors = (tmp_path / "False").read_text(), (tmp_path / "True").read_text()
    assert people.endswith(" rank 0 | the end\n  steps   500\n  a step  forward 40%\n")
    assert json.loads(collectors)["table"] == table and collectors.count("\n") == 1


def test_set_up_again_appends_and_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rank-0.log"
    for text in ("one", "two"):
        setup(path, 0, 0, to_terminal=True, json_lines=False).info(text)
    assert [line.split(" | ")[1] for line in path.read_text().splitlines()] == ["one", "two"]
    assert capsys.readouterr().err.count("\n") == 2


def test_without_file_and_terminal_nothing_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    setup(None, 1, 0, to_terminal=False, json_lines=False).error("lost")
    logging.getLogger("tandem.child").error("lost too")
    assert capsys.readouterr() == ("", "")


def test_a_file_that_cannot_be_opened_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file, not a directory")
    with pytest.raises(ConfigError, match="cannot write the log .*--run-dir") as caught:
        setup(tmp_path / "log" / "rank-0.log", 0, 0, to_terminal=False, json_lines=False)
    assert "\n" not in str(caught.value)


def test_a_line_says_the_step_that_the_process_is_at(tmp_path: Path) -> None:
    logger = setup(tmp_path / "log", 0, 0, to_terminal=False, json_lines=True)
    clock = Clock()
    logger.handlers[0].addFilter(clock.stamp)
    clock.resume(12)
    logger.warning("one")
    logger.warning("two", extra={"rank": 5})
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert (first["step"], second["step"], second["rank"]) == (12, 12, 0)


@pytest.mark.parametrize(
    ("level", "terminal", "file"),
    [("warning", "w", "iw"), ("info", "iw", "iw"), ("debug", "diw", "diw"), ("", "iw", "iw")],
)
def test_the_level_is_the_terminals_and_the_file_keeps_all_lines(
    level: str,
    terminal: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TANDEM_LOG_LEVEL", level)
    logger = setup(tmp_path / "node-0.log", None, 0, to_terminal=True, json_lines=False)
    logger.debug("=d")
    logger.info("=i")
    logger.warning("=w", extra={"detail": "more"})
    shown = capsys.readouterr().err
    assert "".join(re.findall("=(.)", shown)) == terminal and ("more" in shown) == (level == "debug")
    assert "".join(re.findall("=(.)", (tmp_path / "node-0.log").read_text())) == file


def test_an_unknown_level_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="^TANDEM_LOG_LEVEL: invalid value 'loud'; expected "):
        setup(None, None, 0, to_terminal=True, json_lines=False)
