"""The flag that stop signals set, where a handler must not raise at any place."""

import subprocess
import sys

from patience import patient
from program_files import PROGRAMS


def test_a_stop_during_a_fork_is_raised_after_it() -> None:
    done = subprocess.run(
        [sys.executable, PROGRAMS / "stop_during_fork.py"],
        capture_output=True,
        text=True,
        timeout=patient(60),
    )
    assert done.stdout.startswith("forked SIGTERM"), done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("True set()")
    assert done.stderr == "", "Python dropped an error"
