"""What a start says of itself: nothing while it is quick or speaks anyway, one line where it is silent."""

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tandem.log import log_if_slow as still_for
from tandem.log import setup, wrap_terminal_lines

log = logging.getLogger("tandem.run")
still = partial(still_for, silence=0.3, soon=0.1)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    setup(None, None, 0, to_terminal=True, json_lines=False)
    yield written
    setup(None, None, 0, to_terminal=False, json_lines=False)


def test_a_quick_start_has_no_line_and_a_slow_one_has_one(terminal: io.StringIO) -> None:
    with still("importing torch"):
        pass
    assert terminal.getvalue() == ""
    threads = threading.active_count()
    with still("importing torch"):
        time.sleep(1)
    assert re.fullmatch(r"\d\d:\d\d:\d\d node 0 \| still importing torch\n", terminal.getvalue())
    assert threading.active_count() == threads, "who forks next has one thread"


def test_a_silence_goes_on_from_one_block_to_the_next_and_ends_with_any_line(terminal: io.StringIO) -> None:
    time.sleep(0.3)
    began = time.monotonic()
    with still("importing torch"):
        while not terminal.getvalue() and time.monotonic() < began + 0.29:
            time.sleep(0.01)
    assert "still importing torch" in terminal.getvalue()
    log.info("the live page is there")
    with still("waiting for nodes"):
        log.info("one of them is here")
        time.sleep(1)
    assert "still waiting" not in terminal.getvalue()


def test_what_takes_half_a_second_after_a_silence_is_not_worth_a_line(terminal: io.StringIO) -> None:
    time.sleep(0.5)
    with still("importing torch"):
        pass
    time.sleep(0.3)
    assert terminal.getvalue() == ""


def test_a_bar_is_news_and_who_has_no_terminal_says_nothing(terminal: io.StringIO) -> None:
    @contextmanager
    def way() -> Iterator[None]:
        yield

    wrap_terminal_lines(way)
    with still("in the first steps"):
        time.sleep(0.6)
    assert terminal.getvalue() == ""
    setup(None, 1, 0, to_terminal=False, json_lines=False)
    with still("in the first steps"):
        time.sleep(0.6)
    assert terminal.getvalue() == ""
