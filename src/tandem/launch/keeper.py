"""The fork server of a node keeps all that its ranks start, and ends it with the agent, however that ends.

Each rank leads a session of its own, below the fork server, which leads one too: nothing that is meant for
the agent's process group ends it. What is left when a rank ends becomes the fork server's child (a subreaper,
see deaf.py), also what has made itself a daemon: so the agent finds it, and ends it. When the agent dies,
however it does, the kernel sends the fork server SIGCONT, which it hears even where somebody has stopped it.
(The end of the pipe that multiprocessing gives a fork server would come too late: ranks hold it, too.)

Importing this is enough, as for deaf.py, and only a fork server does; last, when it has imported all else.
"""

import os
import signal
from contextlib import suppress
from types import FrameType

from tandem.process import end_below, end_with_parent
from tandem.timeouts import KILLED_SECONDS


def _end_with_agent(_number: int, _frame: FrameType | None) -> None:
    if os.getpid() == KEEPER and os.getppid() != AGENT:
        end_below(KEEPER, KILLED_SECONDS)
        os._exit(0)


KEEPER, AGENT = os.getpid(), os.getppid()
with suppress(PermissionError):  # it leads one already
    os.setsid()
signal.signal(signal.SIGCONT, _end_with_agent)
end_with_parent(signal.SIGCONT)
