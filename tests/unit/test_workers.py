"""Processes forked for a rank: a stop that comes before they have handlers is heard when they have."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

STARTED_TOO_LATE = """
import signal, time
from tandem.signals import default_signals

def rank(job, position):
    open("forked", "w").close()
    while not __import__("os").path.exists("signalled"):
        time.sleep(0.01)
    default_signals()
    time.sleep(300)
"""
INTERRUPTED = """
def rank(job, position):
    raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")
"""
"""What torch's handler of SIGCHLD raises while the rank's own code deals with the first sign of that end."""
REPORTS = """
import sys
from pathlib import Path
from tandem.launch.fork_server import start_fork_server
from tandem.launch.workers import Workers
from agent import Place

if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    workers = Workers("hit:rank", None, [])
    workers.start({0: Place()})
    print(workers.wait(60), workers.codes())
    workers.kill()
"""
DYING = "import os\nos._exit(1)\n"
AGENT = """
import os, signal, sys, time
from dataclasses import dataclass
from pathlib import Path
from tandem.errors import TandemError
from tandem.launch.fork_server import start_fork_server
from tandem.launch.workers import Workers

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
DELAYED = """
import os, time
from tandem.launch import workers

original = workers.end_with_parent

def end_with_parent(number):
    parent = os.getppid()
    open("asked", "w").close()
    while os.getppid() == parent:
        time.sleep(0.01)
    original(number)

def warm_up(job, expected):
    open("warmed", "w").close()

workers.end_with_parent = end_with_parent
"""
"""A busy machine: what is forked gets on only when the fork server, and its agent, are gone."""
ENDING = """
import os, sys, time
from pathlib import Path
from agent import Workers, start_fork_server

if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    Workers("late:rank", None, [], "delayed:warm_up").stand_by(1)
    while not os.path.exists("asked"):
        time.sleep(0.01)
    os._exit(7)
"""
"""A rank whose program has a fork server of its own: what comes from that is the program's."""
OWN_POOL = """
import multiprocessing, signal, sys, time
from tandem.signals import StopFlag

def sleeps(said):
    ours = [name for name in ("tandem.launch.deaf", "tandem.launch.warm", "torch") if name in sys.modules]
    said.put((ours, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL))
    time.sleep(300)

def rank(job, position):
    StopFlag().install()
    own = multiprocessing.get_context("forkserver")
    said = own.SimpleQueue()
    child = own.Process(target=sleeps, args=(said,))
    child.start()
    print(*said.get(), flush=True)
    child.terminate()
    child.join(30)
    print(child.exitcode, flush=True)
    return 0
"""
OWN = """
import sys
from pathlib import Path
from agent import Place, Workers, start_fork_server

if __name__ == "__main__":
    start_fork_server(["tandem.launch.warm"], Path(sys.argv[1]))
    workers = Workers("pool:rank", None, [])
    workers.start({0: Place()})
    workers.wait(80)
    workers.kill()
"""
"""The fork server is killed, as where memory is short, and its folder has a file of a library's name."""
AGAIN = """
import multiprocessing.forkserver, os, signal, sys
from pathlib import Path
from agent import Place, Workers, start_fork_server

if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    pid = multiprocessing.forkserver._forkserver._forkserver_pid
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.mkdir("here")
    os.chdir("here")
    Path("random.py").write_text("open('was-run', 'w')")
    workers = Workers("posixpath:join", "", [])
    workers.start({0: Place()})
    workers.wait(80)
    print(workers.kill())
"""
"""Ranks whose GPU was opened in advance: generations in which the nodes have other places each time."""
BOUND = """
import os, time
from pathlib import Path

def warm_up(job, expected):
    Path(f".warm-{os.getpid()}").write_text(str(expected.local_rank))
    os.rename(f".warm-{os.getpid()}", f"warm-{os.getpid()}")

def rank(job, position):
    if position.nodes == 3:
        os._exit(134 if position.local_rank else 0)
    time.sleep(300)
"""
GENERATIONS = """
import sys, time
from pathlib import Path
from agent import Place, Workers, start_fork_server
from tandem.work.base import gpu_of

def warm():
    return {int(path.name[5:]): int(path.read_text()) for path in Path().glob("warm-*")}

if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers("bound:rank", None, [], "bound:warm_up", gpu_of)
    for number, ranks in ((1, (0, 1)), (2, (3, 2)), (3, (0, 1))):
        ready = warm()
        pids = workers.start({gpu: Place(rank=rank, local_rank=gpu, nodes=number)
                              for gpu, rank in enumerate(ranks)})
        while not set(pids.values()) <= warm().keys():
            time.sleep(0.01)
        print([warm()[pids[gpu]] for gpu in (0, 1)], len(ready.keys() & set(pids.values())))
        while len(warm()) < 2 * number + 2:
            workers.stand_by(2)
            time.sleep(0.01)
        if number == 3:
            workers.wait(60)
        print(sorted(workers.kill().values()), len(workers._standby))
"""
"""The job has another size: what stood by for a place that is no more makes room."""
RESIZED = """
import sys, time
from pathlib import Path
from agent import Place, Workers, start_fork_server
from generations import warm
from tandem.work.base import place_of

if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers("bound:rank", None, [], "bound:warm_up", place_of)
    for size in (1, 2, 2):
        ready = warm()
        pids = workers.start({0: Place(world_size=size)})
        print(len(ready.keys() & set(pids.values())))
        while not warm().keys() - ready.keys() - set(pids.values()):
            workers.stand_by(1)
            time.sleep(0.01)
        workers.kill()
    workers.dismiss()
"""
TEXTS = {"late": STARTED_TOO_LATE, "dying": DYING, "agent": AGENT, "stuck": STUCK}
TEXTS |= {"delayed": DELAYED, "ending": ENDING, "pool": OWN_POOL, "own": OWN, "again": AGAIN}
TEXTS |= {"hit": INTERRUPTED, "reports": REPORTS}
TEXTS |= {"bound": BOUND, "generations": GENERATIONS, "resized": RESIZED}
pytestmark = pytest.mark.timeout(110)


def agent(folder: Path, preload: str, program: str = "agent") -> subprocess.CompletedProcess[str]:
    for name, text in TEXTS.items():
        (folder / f"{name}.py").write_text(text)
    search = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search}
    with tempfile.TemporaryDirectory() as scratch:  # sockets lie in it: tmp_path may be too long for one
        command = [sys.executable, f"{program}.py", scratch, preload]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100
        )


def test_a_stop_between_fork_and_handlers_is_not_lost(tmp_path: Path) -> None:
    done = agent(tmp_path, "late")
    assert done.stdout == "True {0: 143}\n", (done.stdout, done.stderr)


def test_a_fork_server_that_dies_is_one_line(tmp_path: Path) -> None:
    done = agent(tmp_path, "dying")
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("200: the process that forks the ranks was killed ("), done.stderr


def test_a_standby_with_an_open_gpu_becomes_the_rank_of_that_gpu(tmp_path: Path) -> None:
    """Whatever its rank is by then; where a GPU has failed, new processes begin the next generation."""
    done = agent(tmp_path, "", "generations")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        *("[0, 1] 0", "[137, 137] 2"),
        *("[0, 1] 2", "[137, 137] 2"),
        *("[0, 1] 2", "[0, 134] 0"),
    ]


def test_what_stands_by_for_a_place_that_is_gone_makes_room(tmp_path: Path) -> None:
    """It was kept, and every restart after a change of size began with a new process."""
    done = agent(tmp_path, "", "resized")
    assert (done.returncode, done.stdout.split()) == (0, ["0", "0", "1"]), done.stderr


def test_a_rank_that_does_not_end_when_it_is_killed_is_said(tmp_path: Path) -> None:
    """One whose GPU's driver hangs keeps its memory, and the next generation fails for want of it."""
    done = agent(tmp_path, "", "stuck")
    if "no ptrace" in done.stderr:
        pytest.skip("no process can be stopped on its way out here")
    assert done.returncode == 0, done.stderr
    codes, _, pid = done.stdout.strip().rpartition(" ")
    assert codes == "{0: 137, 1: 137}"
    said = [line for line in done.stderr.splitlines() if "after SIGKILL" in line]
    assert len(said) == 1 and said[0].startswith(f"rank 1 (process {pid}) has not exited 1 s after SIGKILL")


def test_a_standby_whose_agent_has_just_ended_does_not_warm_up(tmp_path: Path) -> None:
    """It holds the agent's output, and who reads that waits for all that a program has imported."""
    done = agent(tmp_path, "delayed", "ending")
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "asked").exists() and not (tmp_path / "warmed").exists()


def test_a_ranks_own_fork_server_is_not_deaf_and_has_nothing_of_ours(tmp_path: Path) -> None:
    """What it forked ignored SIGTERM, so a pool's end never came, and each server imported torch anew."""
    done = agent(tmp_path, "", "own")
    assert done.stdout == "[] True\n-15\n", (done.stdout, done.stderr)


def test_a_fork_server_that_is_started_anew_runs_no_file_of_the_current_folder(tmp_path: Path) -> None:
    done = agent(tmp_path, "", "again")
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "here" / "was-run").exists(), done.stderr


def test_a_killed_loader_process_is_one_whatever_the_rank_is_at(tmp_path: Path) -> None:
    done = agent(tmp_path, "hit", "reports")
    assert done.stdout == "True {0: 137}\n", (done.stdout, done.stderr)
