"""Who of a rank's session hears a stop signal: real processes, each with or without a handler."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from patience import patient
from program_files import program_text
from tandem.launch.workers import has_handler, signal_session

HEARS = program_text("sessions_hears")
ABOVE = program_text("sessions_above")
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)
UNKNOWN = int(signal.SIGWINCH)  # a handler for what nobody sends


class Session:
    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()
        (folder / "hears.py").write_text(HEARS)
        (folder / "above.py").write_text(ABOVE)

    def start(self, above: int, below: int) -> int:
        words = [sys.executable, "above.py", str(above), str(below)]
        process = subprocess.Popen(words, cwd=self.folder, start_new_session=True)
        self.started.append(process)
        self.until("ready-above", "ready-below", "ready-helper")
        return process.pid

    def until(self, *names: str) -> None:
        deadline = time.monotonic() + patient(30)
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < deadline, (names, os.listdir(self.folder))
            time.sleep(0.02)

    def heard(self) -> set[str]:
        return {each.name for each in self.folder.glob("[ab]*-*")}


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    own = Session(tmp_path)
    yield own
    for process in own.started:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_all_that_know_it_hear_it_and_their_helpers_serve_on(session: Session) -> None:
    leader = session.start(TERM, TERM)
    assert has_handler(leader, signal.SIGTERM) and not has_handler(leader, signal.SIGUSR1)
    assert len(signal_session(leader, signal.SIGTERM)) == 2
    session.until(f"above-{TERM}", f"below-{TERM}")
    session.started[0].send_signal(0)
    helpers = [each for each in _children(leader) if not has_handler(each, signal.SIGTERM)]
    assert len(helpers) == 1, "a helper without a handler has ended before the rank could save"


def test_a_wrapper_without_a_handler_ends_and_its_program_hears(session: Session) -> None:
    leader = session.start(UNKNOWN, TERM)
    (hears,) = signal_session(leader, signal.SIGTERM)
    session.until(f"below-{TERM}")
    assert session.started[0].wait(patient(30)) == -signal.SIGTERM
    os.kill(hears, 0)


def test_sigusr1_is_sigterm_to_who_does_not_know_it(session: Session) -> None:
    leader = session.start(TERM, USR1)
    assert len(signal_session(leader, signal.SIGUSR1)) == 2
    session.until(f"above-{TERM}", f"below-{USR1}")
    assert session.heard() == {f"above-{TERM}", f"below-{USR1}"}


def _children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
