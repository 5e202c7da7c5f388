"""What a person sees on a terminal, by one: a real pseudo-terminal of a known width, and what stays on it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from patience import patient
from program_files import program_text

SOURCE = Path(__file__).parents[2] / "src"
NO_RICH = "import sys; sys.modules['rich'] = None\n"
TRAINS = program_text("terminal_trains")
DIES = program_text("terminal_dies")
LINE = r"\d\d:\d\d:\d\d (?:rank|node) 0 \| "


def on_a_terminal(program: str, columns: int, **variables: str) -> str:
    """All that a program writes to a terminal so wide."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    unset = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {"TERM": "xterm-256color", "PYTHONPATH": str(SOURCE), "PYTHONUTF8": "1", **variables}
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs, env=environ
    )
    os.close(theirs)
    written = b""
    try:
        while piece := os.read(ours, 65536):
            written += piece
    except OSError:  # the terminal has no writer any more
        pass
    os.close(ours)
    assert process.wait(patient(60)) == 0, written.decode()
    return written.decode()


def screen(written: str, columns: int) -> list[str]:
    """What stays to be read, of returns, line ends, cleared ends of lines and wrapping."""
    lines, row, at = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;]*[A-Za-z]|[^\x1b]", re.sub(r"\x1b\[[0-9;]*m", "", written)):
        if token == "\r":
            at = 0
        elif token == "\n":
            row, at = row + 1, 0
        elif token == "\x1b[K":
            lines[row] = lines[row][:at]
        elif token == "\x1b[A":
            row -= 1
        else:
            assert len(token) == 1, f"what else moves the cursor: {token!r}"
            if at == columns:
                row, at = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
            lines[row] = lines[row][:at].ljust(at) + token + lines[row][at + 1 :]
            at += 1
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("before", ["", NO_RICH], ids=["rich", "tqdm"])
@pytest.mark.parametrize("columns", [40, 100])
def test_lines_and_one_bar_stay(before: str, columns: int) -> None:
    seen = screen(on_a_terminal(before + TRAINS, columns), 2 * columns if columns == 40 else columns)
    assert len(seen) == 4, "\n".join(seen)
    assert re.fullmatch(LINE + "evaluation after step 600: accuracy 0.9", seen[0])
    assert re.fullmatch(LINE + "warning: a save has failed", seen[1])
    assert "100%" in seen[2] and "loss 0.1234" in seen[2] and len(seen[2]) <= columns
    assert columns == 40 or "1,170 samples/s" in seen[2]
    assert re.fullmatch(LINE + "the end", seen[3])


def test_color_is_there_unless_it_is_not_wanted() -> None:
    pytest.importorskip("rich")
    color = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:3[0-9]|9[0-7]|38;[0-9;]*)m")
    shown = on_a_terminal(TRAINS, 80)
    assert color.search(shown) and "\x1b[33m" in shown, "a warning is yellow"
    plain = on_a_terminal(TRAINS, 80, NO_COLOR="1")
    assert not color.search(plain) and "100%" in plain


def test_a_terminal_that_knows_nothing_gets_plain_lines() -> None:
    written = on_a_terminal(TRAINS, 80, TERM="dumb")
    assert "\x1b" not in written and "step 1,200 of 1,200 (epoch 3): loss 0.1234" in written


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}])
def test_off_a_terminal_there_is_neither_bar_nor_color(variables: dict[str, str]) -> None:
    environ = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", **variables}
    ended = subprocess.run(
        [sys.executable, "-c", TRAINS], capture_output=True, text=True, env=environ, timeout=patient(60)
    )
    assert "\x1b" not in ended.stderr and "\r" not in ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("the end")


@pytest.mark.parametrize("before", ["", NO_RICH], ids=["rich", "tqdm"])
def test_the_bar_of_a_rank_that_is_killed_makes_way_for_who_says_so(before: str) -> None:
    written = on_a_terminal(before + DIES, 100)
    (line,) = screen(written, 100)
    assert re.fullmatch(LINE + "warning: rank 0 on node 0 was killed", line)
    assert "\x1b[?25l" not in written, "the cursor was never hidden"
