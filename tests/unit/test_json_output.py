"""stderr as JSON lines: native code, crashes, progress bars, and tandem's own records."""

import errno
import json
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

from patience import patient
from tandem.json_output import wrap_stderr

SETUP = """
import logging, os, signal, subprocess, sys, time
from tandem.json_output import drain, wrap_stderr
from tandem.log import setup

setup(None, 1, 3, to_terminal=True, json_lines=True)
wrap_stderr(3)
log = logging.getLogger("tandem")
"""
FRAMES = "[W1125 14:02:07.1 TCPStore.cpp:106] recv failed\\nframe #0: a\\nframe #1: b\\n"


def lines(program: str, code: int = 0) -> list[dict[str, Any]]:
    """The records on the stderr of a program. Every line has to be one."""
    words = [sys.executable, "-c", SETUP + program]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=patient(60))
    assert ended.returncode == code, ended.stderr
    return [json.loads(line) for line in ended.stderr.splitlines()]


def test_native_lines_become_one_record_and_records_pass_unchanged() -> None:
    said = lines(f"log.info('first')\nos.write(2, b'{FRAMES}')\nlog.error('last', extra={{'step': 5}})")
    assert [each["message"] for each in said] == ["first", FRAMES.split("\\n")[0], "last"]
    assert [each["level"] for each in said] == ["info", "warning", "error"]
    assert said[1]["output"].count("frame #") == 2 and "output" not in said[0]
    assert said[1]["node"] == said[2]["node"] == 3 and said[1]["rank"] is None and said[2]["step"] == 5


@pytest.mark.parametrize(
    ("ending", "code"),
    [("os.abort()", -6), ("os.kill(os.getpid(), 9)", -9), ("drain(); os._exit(7)", 7), ("sys.exit(3)", 3)],
)
def test_the_last_words_of_a_process_are_records_after_any_exit(ending: str, code: int) -> None:
    said = lines(f"os.write(2, b'terminate called'); {ending}", code)
    assert [each["message"] for each in said] == ["terminate called"]


def test_tracebacks_and_the_output_of_children_are_records() -> None:
    said = lines("subprocess.run(['sh', '-c', 'echo of a child >&2'])\nlog.info('next')\n1 / 0", 1)
    assert [each["message"] for each in said[:2]] == ["of a child", "next"]
    assert said[2]["message"].startswith("Traceback")
    assert "ZeroDivisionError" in "".join(each.get("output", each["message"]) for each in said[2:])


def test_text_that_is_not_a_json_object_becomes_a_record() -> None:
    odd = ["{not json", "{" * 3000, "[1, 2]", "\\xff\\x00\\x1b[31m", "10%\\r20%\\r30%"]
    said = lines("\n".join(f"os.write(2, b'{each}\\n'); log.info('next')" for each in odd))[::2]
    assert [each["message"][:5] for each in said] == ["{not ", "{" * 5, "[1, 2", "\ufffd\x00\x1b[3", "30%"]


def test_a_line_without_a_newline_is_split() -> None:
    said = lines("for _ in range(64): os.write(2, b'x' * 65536)")
    assert sum(len(each["message"]) for each in said) == 64 * 65536
    assert max(len(each["message"]) for each in said) < 3 * 65536


def test_a_long_json_record_is_not_split() -> None:
    said = lines("log.info('x' * 300_000); log.info('next')")
    assert [len(each["message"]) for each in said] == [300_000, 4]


def test_a_signal_to_the_process_group_does_not_end_the_writer() -> None:
    group = "[signal.signal(each, signal.SIG_IGN) for each in (2, 15)]; os.killpg(os.getpgid(0), 2)"
    said = lines(f"os.setpgrp(); {group}; log.info('goes on')")
    assert said[-1]["message"] == "goes on"


def test_a_closed_reader_does_not_end_the_program() -> None:
    program = SETUP + "[log.info('x' * 4000) for _ in range(200)]; drain(); print('done')"
    words = [sys.executable, "-c", program]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        process.stderr.close()
        assert process.stdout.read() == "done\n" and process.wait(60) == 0


def test_without_a_process_for_the_writer_stderr_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    open_before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr("tandem.json_output.os.fork", refuse)
    monkeypatch.setattr(logging.getLogger("tandem"), "propagate", True)
    stderr = os.fstat(2)
    wrap_stderr(0)
    assert os.path.samestat(os.fstat(2), stderr) and set(os.listdir("/proc/self/fd")) == open_before
    assert "stderr" in caplog.text
