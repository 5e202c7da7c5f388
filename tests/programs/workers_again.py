import multiprocessing.forkserver
import os
import posixpath
import signal
import sys
from pathlib import Path

from agent import Workers, start_as, start_fork_server

if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    pid = multiprocessing.forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.mkdir("here")
    os.chdir("here")
    Path("random.py").write_text("open('was-run', 'w')")
    workers = Workers(posixpath.join, "", [])
    workers.start({0: start_as()})
    workers.wait(80)
    print(workers.kill())
