"""A folder per agent: what a killed one left goes with the next, what a living one has stays."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tandem.launch.scratch import scratch

HOLD = """
from tandem.launch.scratch import scratch

with scratch() as folder:
    print(folder, flush=True)
    input()
"""


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


def test_what_killed_agents_left_is_swept_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "tandem-1-999999999-other").mkdir()  # of another PID namespace
    (tmp_path / "tandem-recovery-x").mkdir()
    killed, left = hold(tmp_path)
    living, kept = hold(tmp_path)
    try:
        killed.kill()
        assert killed.wait(20) == -signal.SIGKILL and left.is_dir()
        with scratch() as mine:
            assert mine.is_dir() and mine.parent == tmp_path
            assert not left.exists() and kept.is_dir()
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            ["tandem-1-999999999-other", "tandem-recovery-x", kept.name]
        )
    finally:
        for process in (killed, living):
            process.communicate("\n", timeout=20)
    assert not kept.exists()
