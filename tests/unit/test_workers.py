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
STUCK = """
import ctypes, logging, os, sys
from pathlib import Path
from tandem.launch import workers as module
from agent import Place, Workers, start_fork_server

PTRACE_SEIZE, PTRACE_O_TRACEEXIT, PTRACE_DETACH = 0x4206, 0x40, 17

def ptrace(request, pid, data=None):
    call = ctypes.CDLL(None).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return call(request, pid, None, data)

if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    module.KILLED_SECONDS = 1.0
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers("late:rank", None, [])
    pids = workers.start({0: Place(), 1: Place(rank=1, local_rank=1)})
    if ptrace(PTRACE_SEIZE, pids[1], PTRACE_O_TRACEEXIT):  # it will stop in the kernel, on its way out
        sys.exit("no ptrace")
    print(workers.kill(), pids[1])
    ptrace(PTRACE_DETACH, pids[1])
"""
TEXTS = {"late": STARTED_TOO_LATE, "dying": DYING, "agent": AGENT, "stuck": STUCK}
pytestmark = pytest.mark.timeout(110)


def agent(folder: Path, preload: str, program: str = "agent") -> subprocess.CompletedProcess[str]:
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
    search = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": search}
    command = [sys.executable, f"{program}.py", "/tmp", preload]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


def test_a_stop_between_fork_and_handlers_is_not_lost(tmp_path: Path) -> None:
    done = agent(tmp_path, "late")
    assert done.stdout == "True {0: 143}\n", (done.stdout, done.stderr)


def test_a_fork_server_that_dies_is_one_line(tmp_path: Path) -> None:
    done = agent(tmp_path, "dying")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("200: the process that ranks are forked from is gone ("), done.stderr


def test_a_rank_that_does_not_end_when_it_is_killed_is_said(tmp_path: Path) -> None:
    """One whose GPU's driver hangs keeps its memory, and the next generation fails for want of it."""
    done = agent(tmp_path, "", "stuck")
    if "no ptrace" in done.stderr:
        pytest.skip("no process can be stopped on its way out here")
    assert done.returncode == 0, done.stderr
    codes, _, pid = done.stdout.strip().rpartition(" ")
    assert codes == "{0: 137, 1: 137}"
    said = [line for line in done.stderr.splitlines() if "after SIGKILL" in line]
    assert len(said) == 1 and said[0].startswith(f"rank 1 (process {pid}) has not ended 1 s after SIGKILL")
