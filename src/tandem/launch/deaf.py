"""The fork server imports this first of all: it is deaf to stop signals from then on, and ends with its agent.

A scheduler signals the whole process tree. Were the fork server to die of it, the agent would lose its
ranks' exit codes while they still save; each rank installs its own handlers first thing. It was started with
these signals blocked (`workers.start_fork_server`), so none can have reached it before. No torch.
"""

import signal

from tandem.process import end_with_parent
from tandem.signals import IGNORED_BY_FORK_SERVER, ignore_stop_signals

ignore_stop_signals()
signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_BY_FORK_SERVER)
# Its pipe tells it too that the agent is gone, but not while it is stopped, or its interpreter stuck in C.
end_with_parent(signal.SIGKILL)
