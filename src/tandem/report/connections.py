"""An HTTP server that many clients can neither overload nor block."""

import logging
import socket
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import TCPServer, ThreadingMixIn
from ssl import SSLContext
from typing import Any

from tandem.timeouts import REQUEST_SECONDS

logger = logging.getLogger("tandem")

MAX_CONNECTIONS = 32


class BoundedServer(ThreadingMixIn, HTTPServer):
    """At most MAX_CONNECTIONS threads; further clients wait in the kernel's queue, and none is rejected.

    When all threads are in use, the client that has been silent longest is disconnected. A scraper sends its
    request at once, so silent clients cannot block it.
    """

    # Neither an open connection nor its thread may keep the agent from exiting.
    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # two runs must not share a port unnoticed
    # With socketserver's default of 5, the kernel would drop connections as soon as a few wait.
    request_queue_size = 256

    def __init__(
        self,
        address: tuple[str, int],
        family: socket.AddressFamily,
        handler: type[BaseHTTPRequestHandler],
        tls: SSLContext | None = None,
    ) -> None:
        self.address_family = family
        self._tls = tls
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._silent: dict[socket.socket, None] = {}  # ordered by arrival
        self._silent_lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's own asks DNS for the host's name, which can hang

    def get_request(self) -> tuple[socket.socket, Any]:
        if not self._slots.acquire(blocking=False):
            self._drop_longest_silent()
            # The disconnected client's thread frees its slot within this time. The limit keeps `shutdown`
            # quick.
            if not self._slots.acquire(timeout=0.2):
                raise OSError("all connections are in use")  # serve_forever tries again
        try:
            connection, address = super().get_request()
            # The handshake happens at the first read, in the connection's own thread.
            if self._tls is not None:
                connection.settimeout(REQUEST_SECONDS)
                tls = self._tls
                connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        except OSError:
            self._slots.release()
            time.sleep(0.01)  # if file descriptors ran out, do not spin
            raise
        with self._silent_lock:
            self._silent[connection] = None
        return connection, address

    def heard(self, connection: socket.socket) -> None:
        """Record that this client has sent its request, or is gone."""
        with self._silent_lock:
            self._silent.pop(connection, None)

    def _drop_longest_silent(self) -> None:
        with self._silent_lock:
            if self._silent:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                # Not SSLSocket's method, which would take the TLS state away from the thread that is reading.
                with suppress(OSError):  # wakes its thread, which closes it
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.heard(request)
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.heard(request)
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # At level debug, because any client could otherwise fill the log.
        logger.debug("metrics: a client went away or sent garbage", exc_info=True)
