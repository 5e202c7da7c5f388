"""The fork server imports this first of all: deaf to stop signals from then on, it ends with its agent.

A scheduler signals the whole process tree. Were the fork server to die of it, the agent would lose its
ranks' exit codes while they still save. It was started with these signals blocked
(`workers.start_fork_server`), so none can have reached it before. Those that stop a rank stay blocked: Linux
keeps a signal that is blocked, also where it is ignored, so a rank hears what was sent to it between its
fork and its own handlers, which let the signals through (`signals.hear_stop_signals`). No torch.

Nothing of the current folder is imported here, and what ranks start themselves hears nothing of that.
"""

import os
import signal

from tandem.process import end_with_parent, take_back_safe_path
from tandem.signals import IGNORED_BY_FORK_SERVER, STOP_SIGNALS, ignore_stop_signals

take_back_safe_path(os.environ)
ignore_stop_signals()
signal.pthread_sigmask(signal.SIG_UNBLOCK, set(IGNORED_BY_FORK_SERVER) - set(STOP_SIGNALS))
# Its pipe tells it too that the agent is gone, but not while it is stopped, or its interpreter stuck in C.
end_with_parent(signal.SIGKILL)
