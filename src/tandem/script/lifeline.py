"""Watch the pipe from the agent to a rank: answer the agent's requests, and exit when it is closed."""

import os
import struct
import threading

from tandem.errors import PEER_LOST
from tandem.telemetry.inspection import handle
from tandem.telemetry.stacks import write_stacks

STACKS = b"stacks"
"""Request for stacks in the log directory; any other message is a request of `telemetry/inspection.py`."""
_descriptor: int | None = None


def watch_agent_pipe(descriptor: int) -> None:
    """Watch the pipe in a thread from now on."""
    global _descriptor
    _descriptor = descriptor

    def read() -> None:
        try:
            while (message := _message(descriptor)) is not None:
                if message == STACKS:
                    write_stacks()
                else:
                    handle(message)
        # Treat an error of the pipe like its end: the agent can no longer be reached.
        except OSError:
            pass
        # Do not use sys.exit, which would end only this thread.
        os._exit(PEER_LOST)

    threading.Thread(target=read, name="agent-lifeline", daemon=True).start()


def _message(descriptor: int) -> bytes | None:
    """Read one message, as multiprocessing's Connection sends it: its length in four bytes, then its bytes.

    Returns None at the end of the pipe. Raises OSError.
    """
    head = _bytes(descriptor, 4)
    return None if head is None else _bytes(descriptor, *struct.unpack("!i", head))


def _bytes(descriptor: int, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        more = os.read(descriptor, count - len(found))
        if not more:
            return None
        found += more
    return found


def descriptor_for_exec() -> int | None:
    """Return the pipe for the program that this process becomes, or None without an agent."""
    if _descriptor is not None:
        os.set_inheritable(_descriptor, True)
    return _descriptor
