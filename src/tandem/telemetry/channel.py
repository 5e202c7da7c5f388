"""The Unix datagram socket through which ranks send messages to their node's agent, without ever blocking."""

import logging
import os
import socket
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tandem.telemetry.messages import Heartbeat, Message, decode, encode
from tandem.timeouts import LAST_MESSAGES_POLL_SECONDS, LAST_MESSAGES_SECONDS

logger = logging.getLogger("tandem")

MAX_MESSAGE_BYTES = 64 * 1024
MOST_WAITING = 200
"""The kernel's queue takes 10 messages (net.unix.max_dgram_qlen); a busy agent reads them late."""


class Receiver:
    """Binds a Unix datagram socket at `path` and calls `on_message` from a thread until `close`.

    Malformed messages, and those for which `on_message` raises, are counted in `malformed` and reported to
    `on_error` (with "datagram"). Raises OSError if the socket cannot be created.
    """

    def __init__(
        self, path: Path, on_message: Callable[[Message], None], on_error: Callable[[str], None] | None = None
    ) -> None:
        self.malformed = 0
        self._path = path
        self._on_message = on_message
        self._on_error = on_error
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Only a socket is removed: a wrong path must not delete a file.
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left by a killed agent
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            _at_path(path, self._socket.bind)
            # bind follows the umask, and other users must not send messages.
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(0.1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Process the queued messages, then remove the socket; safe to call twice."""
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            # Read this before `recv`: only a timeout that began after `close` proves that the queue is empty.
            closing = self._closing.is_set()
            try:
                # One byte more than allowed, because recv cuts a longer datagram silently.
                self._take(self._socket.recv(MAX_MESSAGE_BYTES + 1))
            except TimeoutError:
                if closing:
                    return
            except OSError:
                return

    def _take(self, datagram: bytes) -> None:
        try:
            if len(datagram) > MAX_MESSAGE_BYTES:
                raise ValueError("too long")
            self._on_message(decode(datagram))
        except Exception:  # after any message, the next one must still be read
            logger.debug("metrics: a bad datagram", exc_info=True)
            self.malformed += 1
            if self._on_error is not None:
                self._on_error("datagram")


class Sender:
    """Sends messages to the Receiver at `path`, or nowhere if it is None; never raises.

    `send` never blocks. Messages that a full queue does not take are sent before the next ones, up to
    MOST_WAITING: a metric that counts up would lose an increment for good. Heartbeats are not kept, because
    the next one replaces them.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.dropped = 0
        self._path = path if path is None else Path(path)
        # The training thread, the heartbeat thread and the checkpoint writer send through one socket.
        self._lock = threading.Lock()
        self._waiting = deque[bytes]()
        self._socket: socket.socket | None = None

    def send(self, message: Message) -> bool:
        """Send a message; return True if it is in the receiver's queue."""
        if self._path is None:
            return False
        with self._lock:
            try:
                data = encode(message)
                if len(data) > MAX_MESSAGE_BYTES:
                    raise ValueError("too long")
                self._send_waiting()
                self._send(data)
                return True
            except BlockingIOError:
                if not isinstance(message, Heartbeat) and len(self._waiting) < MOST_WAITING:
                    self._waiting.append(data)
                else:
                    self.dropped += 1
                return False
            except (OSError, ValueError, TypeError, RecursionError):
                self.dropped += 1
                return False

    def close(self) -> None:
        """Send the queued messages, for at most LAST_MESSAGES_SECONDS."""
        deadline = time.monotonic() + LAST_MESSAGES_SECONDS
        while self._waiting and not self._has_sent_all() and time.monotonic() < deadline:
            time.sleep(LAST_MESSAGES_POLL_SECONDS)
        with self._lock:
            self._disconnect()

    def _has_sent_all(self) -> bool:
        """Send the queued messages; return False if the receiver's queue is full."""
        with self._lock:
            try:
                self._send_waiting()
            except BlockingIOError:
                return False
            except OSError:  # the agent is gone
                self._waiting.clear()
        return True

    def _send_waiting(self) -> None:
        while self._waiting:
            self._send(self._waiting[0])
            self._waiting.popleft()

    def _send(self, data: bytes) -> None:
        if self._socket is not None:
            try:
                self._socket.send(data)
                return
            except (ConnectionError, FileNotFoundError):  # a new receiver is bound to the path
                self._disconnect()
        self._connect().send(data)

    def _connect(self) -> socket.socket:
        assert self._path is not None
        new = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            # Training must not wait for an agent that is busy or stopped.
            new.setblocking(False)
            _at_path(self._path, new.connect)
        except BaseException:
            new.close()
            raise
        self._socket = new
        return new

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _at_path(path: Path, use: Callable[[str], object]) -> None:
    """Call `use` with a short name for `path`, because a socket address holds only 107 bytes."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
