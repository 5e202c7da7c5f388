"""Watch a rank's pipe from its agent: the rank exits when it closes, and writes its stacks on any message."""

import os
import threading

from tandem.errors import PEER_LOST
from tandem.telemetry.stacks import write_stacks

REQUEST_BYTES = 64
_descriptor: int | None = None


def watch_agent_pipe(descriptor: int) -> None:
    """Watch the pipe in a thread from now on."""
    global _descriptor
    _descriptor = descriptor

    def read() -> None:
        try:
            while os.read(descriptor, REQUEST_BYTES):
                write_stacks()
        # An error of the pipe is treated like its end: the agent cannot be reached any more.
        except OSError:
            pass
        # Not sys.exit, which would end only this thread.
        os._exit(PEER_LOST)

    threading.Thread(target=read, name="agent-lifeline", daemon=True).start()


def descriptor_for_exec() -> int | None:
    """Return the pipe, for the program that this process becomes, or None if there is no agent."""
    if _descriptor is not None:
        os.set_inheritable(_descriptor, True)
    return _descriptor
