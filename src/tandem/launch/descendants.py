"""Make the fork server end all descendants of its ranks when the agent ends, however it ends.

The fork server and each rank lead their own sessions, so a signal to the agent's process group does not reach
them. Processes that a rank leaves behind become children of the fork server, which is a subreaper
(fork_server_signals.py), even if they have daemonized. So the agent can find and end them. When the agent
dies, the kernel sends SIGCONT to the fork server, which is delivered even to a stopped process.
(multiprocessing's pipe closes too late for this, because ranks hold its other end as well.)

Importing this module installs the handler. Only a fork server imports it, after everything else.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from tandem.process import end_below, end_with_parent
from tandem.timeouts import KILLED_SECONDS


def _end_with_agent(_number: int, _frame: FrameType | None) -> None:
    # Forked processes inherit this handler, and any process may send SIGCONT. Only the agent's death
    # gives the fork server another parent.
    if os.getpid() == KEEPER and os.getppid() != AGENT:
        end_below(KEEPER, KILLED_SECONDS)
        os._exit(0)


KEEPER = os.getpid()
AGENT = os.getppid()
with suppress(PermissionError):  # it already leads a session
    os.setsid()
signal.signal(signal.SIGCONT, _end_with_agent)
end_with_parent(signal.SIGCONT)
