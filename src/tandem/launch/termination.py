"""Where Kubernetes looks for why a container ended: `kubectl describe pod` and the job's events show it."""

import contextlib
import os
import stat
from pathlib import Path

TERMINATION_LOG = Path("/dev/termination-log")
LARGEST_BYTES = 4096  # what Kubernetes takes of it


def leave_word(reason: str) -> None:
    """Write the reason there, where the kubelet has put such a file; nowhere else is there one."""
    with contextlib.suppress(OSError):
        descriptor = os.open(TERMINATION_LOG, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.write(descriptor, reason.encode(errors="replace")[:LARGEST_BYTES])
        finally:
            os.close(descriptor)
