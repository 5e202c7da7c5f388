"""A rank's pipe to its agent: its end is the rank's, and whatever comes on it asks for the rank's stacks."""

import os
import threading

from tandem.errors import PEER_LOST
from tandem.telemetry.stacks import write_stacks

REQUEST_BYTES = 64
_descriptor: int | None = None


def heed(descriptor: int) -> None:
    """Read the pipe in a thread from now on."""
    global _descriptor
    _descriptor = descriptor

    def read() -> None:
        try:
            while os.read(descriptor, REQUEST_BYTES):
                write_stacks()
        except OSError:
            pass
        os._exit(PEER_LOST)

    threading.Thread(target=read, name="agent-lifeline", daemon=True).start()


def descriptor_for_exec() -> int | None:
    """The pipe, for the program that this process becomes; None where there is no agent."""
    if _descriptor is not None:
        os.set_inheritable(_descriptor, True)
    return _descriptor
