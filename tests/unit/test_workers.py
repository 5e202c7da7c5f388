"""Processes forked for a rank: a stop that comes before they have handlers is heard when they have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

STARTED_TOO_LATE = """
import signal, time
from tandem.script.execute import default_signals

def rank(job, position):
    open("forked", "w").close()
    while not __import__("os").path.exists("signalled"):
        time.sleep(0.01)
    default_signals()
    time.sleep(300)
"""
DYING = "import os\nos._exit(1)\n"
AGENT = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from tandem.errors import TandemError
from tandem.launch.workers import Workers, start_fork_server

@dataclass
class Place:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    memories: tuple = ()

if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    workers = Workers("late:rank", None, [])
    try:
        (pid,) = workers.start({0: Place()}).values()
    except TandemError as error:
        sys.exit(f"{error.exit_code}: {error}")
    while not os.path.exists("forked"):
        time.sleep(0.01)
    workers.signal(signal.SIGTERM)
    open("signalled", "w").close()
    print(workers.wait(60), workers.codes())
    workers.kill()
"""
pytestmark = pytest.mark.timeout(110)


def agent(folder: Path, preload: str) -> subprocess.CompletedProcess[str]:
    for name, text in (("late", STARTED_TOO_LATE), ("dying", DYING), ("agent", AGENT)):
        (folder / f"{name}.py").write_text(text)
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    command, environment = [sys.executable, "agent.py", "/tmp", preload], {**os.environ, "PYTHONPATH": search}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_a_stop_between_fork_and_handlers_is_not_lost(tmp_path: Path) -> None:
    done = agent(tmp_path, "late")
    assert done.stdout == "True {0: 143}\n", (done.stdout, done.stderr)


def test_a_fork_server_that_dies_is_one_line(tmp_path: Path) -> None:
    done = agent(tmp_path, "dying")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("200: the process that ranks are forked from is gone ("), done.stderr
