"""A folder per agent: what a killed one left goes with the next, what a living one has stays."""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from program_files import program_text
from tandem.errors import ConfigError
from tandem.launch import run_dir as module
from tandem.launch.run_dir import scratch

HOLD = program_text("scratch_hold")


def hold(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"TMPDIR": str(folder)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory whose name leaves room for a socket's; pytest's own are long."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


def test_what_was_killed_meanwhile_is_swept_at_the_end(short: Path) -> None:
    """As by a second Ctrl-C, or of a frozen node: 25 of 100 launches that were ended left a folder."""
    with scratch():
        killed, left = hold(short)
        killed.kill()
        killed.wait(20)
        assert left.is_dir()
    assert list(short.iterdir()) == []


def test_what_killed_agents_left_is_swept_and_nothing_else(short: Path) -> None:
    (short / "tandem-1-999999999-other").mkdir()  # of another PID namespace
    (short / "tandem-recovery-x").mkdir()
    killed, left = hold(short)
    living, kept = hold(short)
    try:
        killed.kill()
        assert killed.wait(20) == -signal.SIGKILL and left.is_dir()
        with scratch() as mine:
            assert mine.is_dir() and mine.parent == short
            assert not left.exists() and kept.is_dir()
        assert sorted(path.name for path in short.iterdir()) == sorted(
            ["tandem-1-999999999-other", "tandem-recovery-x", kept.name]
        )
    finally:
        for process in (killed, living):
            process.communicate("\n", timeout=patient(20))
    assert not kept.exists()


def test_where_no_socket_fits_another_place_is_taken_and_none_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 20)))
    with scratch() as mine:
        assert str(mine.parent) in module.ELSEWHERE
    assert not mine.exists()
    monkeypatch.setattr(module, "ELSEWHERE", ("/nowhere",))
    with pytest.raises(ConfigError, match="in /nowhere: No such file.*TMPDIR"):
        scratch().__enter__()
