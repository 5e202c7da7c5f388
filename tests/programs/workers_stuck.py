import ctypes
import logging
import sys
from pathlib import Path

import late
from agent import Workers, start_as, start_fork_server

from tandem.launch import workers as module

PTRACE_SEIZE, PTRACE_O_TRACEEXIT, PTRACE_DETACH = 0x4206, 0x40, 17


def ptrace(request, pid, data=None):
    call = ctypes.CDLL(None).ptrace
    call.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    return call(request, pid, None, data)


if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    module.KILLED_SECONDS = 1.0  # type: ignore[attr-defined]
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers(late.rank, None, [])
    pids = workers.start({0: start_as(), 1: start_as(rank=1, local_rank=1)})
    if ptrace(PTRACE_SEIZE, pids[1], PTRACE_O_TRACEEXIT):  # it will stop in the kernel, on its way out
        sys.exit("no ptrace")
    print(workers.kill(), pids[1])
    ptrace(PTRACE_DETACH, pids[1])
