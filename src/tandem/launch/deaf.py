"""The fork server ignores stop signals from the start and dies with its agent.

A scheduler signals the whole process tree. Were the fork server to die of it, the agent would lose its
ranks' exit codes while they still save. It was forked with these signals
blocked (`fork_server.py`), so none can have reached it before. Those that stop a rank stay blocked: Linux
keeps a signal that is blocked, also where it is ignored, so a rank hears what was sent to it between its
fork and its own handlers, which let the signals through (`signals.hear_stop_signals`). No torch.

Should multiprocessing start it anew, as an interpreter, importing this is enough. Nothing of the current
folder is imported there, and what ranks start themselves hears nothing of that.
"""

import os
import signal
import warnings

from tandem.process import adopt_orphans, end_with_parent, take_back_safe_path
from tandem.signals import IGNORED_BY_FORK_SERVER, STOP_SIGNALS, ignore_stop_signals


def be_deaf() -> None:
    take_back_safe_path(os.environ)
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(IGNORED_BY_FORK_SERVER) - set(STOP_SIGNALS))
    # Its pipe tells it too that the agent is gone, but not while it is stopped, or stuck in C.
    end_with_parent(signal.SIGKILL)
    adopt_orphans()  # of what was forked from here, so that it is found
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")  # of one of them


be_deaf()
