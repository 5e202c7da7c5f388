"""Find out why node 0 does not answer, and cut the connections to it."""

import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tandem.timeouts import MASTER_ANSWER_SECONDS, STORE_RETRY_SECONDS


class MasterProbe:
    """Distinguish a frozen agent of node 0 from a lost one, in the background.

    The kernel of a frozen process accepts connections, but the process does not answer. If the store answers
    on a new connection, only the old ones are dead. `connect` opens a connection to the store at `host`:
    `port`. Silence after an accepted connection counts after `patience` seconds.
    """

    def __init__(
        self,
        host: str,
        port: int,
        connect: Callable[[], TCPStore],
        patience: float = MASTER_ANSWER_SECONDS,
    ) -> None:
        self._address = host, port
        self._connect = connect
        self._patience = patience
        self._thread: threading.Thread | None = None
        self._accepted_at: float | None = None

    def is_frozen(self) -> bool:
        """Return whether node 0 accepted a connection and has not answered on it. Never waits.

        Starts a probe, whose result later calls return, unless one is running.
        """
        since = self._accepted_at
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._probe, name="tandem-master-probe", daemon=True)
            self._thread.start()
        return since is not None and time.monotonic() - since > self._patience

    def _probe(self) -> None:
        with suppress(OSError, RuntimeError):
            socket.create_connection(self._address, timeout=MASTER_ANSWER_SECONDS).close()
            self._accepted_at = time.monotonic()
            self._connect()  # returns only if the store answers
        self._accepted_at = None
        time.sleep(STORE_RETRY_SECONDS)


def cut_connections(port: int) -> None:
    """Shut down this process's connections to `port`, so that threads that read from them get an error.

    shutdown() wakes a blocked read; close() would not.
    """
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError, ValueError):
            descriptor = int(name)
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue
            # Use a copy: `with` closes its socket, but torch's client owns the original.
            with socket.socket(fileno=os.dup(descriptor)) as copy:
                if copy.family in (socket.AF_INET, socket.AF_INET6) and copy.getpeername()[1] == port:
                    copy.shutdown(socket.SHUT_RDWR)
