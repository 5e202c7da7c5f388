"""Write a container's termination message, which `kubectl describe pod` and the job's events show."""

import contextlib
import os
import stat
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
LARGEST_BYTES = 4096  # Kubernetes reads no more


def write_termination_message(reason: str) -> None:
    """Write the reason to the file, if the kubelet has mounted it."""
    with contextlib.suppress(OSError):
        descriptor = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.write(descriptor, reason.encode(errors="replace")[:LARGEST_BYTES])
        finally:
            os.close(descriptor)
