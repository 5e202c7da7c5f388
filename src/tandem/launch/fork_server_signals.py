"""The fork server ignores stop signals from the start and dies with its agent.

A scheduler signals the whole process tree. If the fork server died of such a signal, the agent would lose the
exit codes of its ranks while they still save. `fork_server.py` forks it with these signals blocked, so none
can arrive before it ignores them. The signals that stop a rank stay blocked: Linux keeps a blocked signal
pending even if it is ignored, so a rank receives signals that arrived between its fork and the installation
of its own handlers, which unblock the signals (`signals.unblock_stop_signals`). Imports no torch.

If multiprocessing starts the fork server again, as a new interpreter, importing this module is enough. That
interpreter imports nothing from the current directory; `undo_safe_path` keeps this from affecting
processes that ranks start.
"""

import os
import signal
import warnings

from tandem.process import adopt_orphans, end_with_parent, undo_safe_path
from tandem.signals import IGNORED_BY_FORK_SERVER, STOP_SIGNALS, ignore_stop_signals


def ignore_signals() -> None:
    undo_safe_path(os.environ)
    ignore_stop_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(IGNORED_BY_FORK_SERVER) - set(STOP_SIGNALS))
    # The fork server's own pipe also ends with the agent, but the kernel's signal works even while the fork
    # server is stopped or blocked in C.
    end_with_parent(signal.SIGKILL)
    adopt_orphans()  # processes that ranks leave behind stay findable below this one
    # multiprocessing warns when it reaps an adopted orphan.
    warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")


ignore_signals()
