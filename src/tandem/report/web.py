"""Serve HTTP for pages and metrics: GET and HEAD, and POST without a body, with limits on each request.

Access control is optional: a bearer token, and TLS.
"""

import base64
import hmac
import ipaddress
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from socketserver import TCPServer, ThreadingMixIn
from ssl import SSLContext
from typing import Any, Protocol

from tandem.config.slices import MetricsConfig
from tandem.errors import ConfigError
from tandem.report.inspection import HEADER
from tandem.timeouts import REQUEST_SECONDS

OPEN_PATHS = ("/healthz", "/readyz")
"""Probes of an orchestrator send no token; without it, these paths return only yes or no."""


@dataclass(frozen=True)
class Access:
    """`token` None: anyone may read. `tls` None: plain HTTP."""

    token: str | None = None
    tls: ssl.SSLContext | None = None

    def allows(self, authorization: str | None) -> bool:
        """Return True if an Authorization header has the token.

        It may be a bearer token, or the password of Basic authentication, which a browser can ask for.
        """
        if self.token is None:
            return True
        scheme, _, credentials = (authorization or "").partition(" ")
        if scheme.lower() == "basic":
            try:
                credentials = base64.b64decode(credentials, validate=True).decode().partition(":")[2]
            except ValueError:  # not Base64, or not UTF-8
                return False
        elif scheme.lower() != "bearer":
            return False
        # Compare in constant time, so that the duration does not show how much of a guess is right, and in
        # bytes, because compare_digest rejects text that is not ASCII.
        return hmac.compare_digest(credentials.strip().encode(), self.token.encode())


def is_local_name(header: str | None) -> bool:
    """Return True if a Host header is an address, or a name that no remote party can have given this machine.

    A malicious page can make its own name resolve to 127.0.0.1. Its scripts can then read from servers there
    (DNS rebinding). Such a name contains a dot. An address is not a name, and a name without a dot belongs to
    this network.
    """
    if header is None:
        return True  # not a browser
    host = header.strip().lower()
    if host.startswith("["):
        host = host[1:].partition("]")[0]
    else:
        host = host.partition(":")[0].removesuffix(".")
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return "." not in host or host.endswith(".localhost")


def load_access(config: MetricsConfig) -> Access:
    """Load the access control for --metrics-token-file and --metrics-tls.

    Raises ConfigError if they cannot be used: protected data is never served without protection.
    """
    token = None
    if config.metrics_token_file is not None:
        try:
            token = config.metrics_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--metrics-token-file {config.metrics_token_file}: {error}") from error
        # Any client could send an empty token.
        if not token:
            raise ConfigError(
                f"--metrics-token-file {config.metrics_token_file} is empty; write a token to it"
            )
    return Access(token, _tls(config.metrics_tls))


def _tls(files: str | None) -> ssl.SSLContext | None:
    if files is None:
        return None
    certificate, _, key = files.partition(",")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # RFC 8996 deprecates TLS 1.0 and 1.1.
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--metrics-tls {files} cannot be used ({error}); expected a certificate in PEM format "
            "and its key, in the same file or after a comma"
        ) from error
    return context


# An HTTP server that many clients can neither overload nor block.

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

    def _take_slot(self) -> None:
        if not self._slots.acquire(blocking=False):
            self._drop_longest_silent()
            # The disconnected client's thread frees its slot within this time. The limit keeps `shutdown`
            # quick.
            if not self._slots.acquire(timeout=0.2):
                raise OSError("all connections are in use")  # serve_forever tries again

    def get_request(self) -> tuple[socket.socket, Any]:
        self._take_slot()
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
        """Record that this client has sent its request, or has disconnected."""
        with self._silent_lock:
            self._silent.pop(connection, None)

    def _drop_longest_silent(self) -> None:
        with self._silent_lock:
            if self._silent:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                # Do not use SSLSocket's method, which would take the TLS state away from the thread that is
                # reading.
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
        # Log at level debug, because any client could otherwise fill the log.
        logger.debug("metrics: a client went away or sent garbage", exc_info=True)


MAX_HEAD_BYTES = 16 * 1024
NOT_CALLED_SO = (
    b"this page is served on loopback only, under local names; open http://localhost:PORT/, or start the "
    b"run with --metrics-token-file\n"
)
SCRAPE_TIMEOUT = "X-Prometheus-Scrape-Timeout-Seconds"
"""The header that Prometheus sends with every scrape, and others that collect for it (agents, vmagent)."""


class Answers(Protocol):
    """The content of a server: its responses, their Content-Security-Policy, and who may read them."""

    access: Access

    @property
    def policy(self) -> str: ...

    def answer(self, path: str, accept: str, allowed: bool = True) -> tuple[int, str, bytes]: ...

    def note_read(self, path: str, moment: float, is_sent: bool = True, is_scraper: bool = False) -> None: ...


class WebServer(BoundedServer):
    """The HTTP server, with the objects that its handler uses."""

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, owner: Answers) -> None:
        self.owner = owner
        self.is_local = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
        super().__init__(address, family, _Handler, owner.access.tls)

    @property
    def url(self) -> str:
        """The server's URL, as a user types it."""
        host = str(self.server_address[0])
        port = self.server_address[1]
        scheme = "https" if self.owner.access.tls is not None else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    """One request per connection. Its head is read within limits of size and time before it is parsed."""

    server: WebServer
    timeout = REQUEST_SECONDS
    server_version = "tandem"
    sys_version = ""

    def handle(self) -> None:
        head = self._read_head()
        self.server.heard(self.connection)
        if head is not None:
            self.rfile = BytesIO(head)
            self.handle_one_request()

    def _read_head(self) -> bytes | None:
        # One deadline covers all reads: otherwise a client that sends occasional bytes would hold a thread.
        deadline = time.monotonic() + REQUEST_SECONDS
        head = b""
        while b"\r\n\r\n" not in head and b"\n\n" not in head:
            left = deadline - time.monotonic()
            if left <= 0 or len(head) > MAX_HEAD_BYTES:
                return None
            self.connection.settimeout(left)
            try:
                chunk = self.connection.recv(4096)
            except OSError:
                return None
            if not chunk:
                return None
            head += chunk
        self.connection.settimeout(REQUEST_SECONDS)
        return head

    def __getattr__(self, name: str) -> Callable[[], None]:
        # http.server looks up methods by name, and itself answers 501 if there is none.
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._send(405, "text/plain; charset=utf-8", b"only GET and HEAD are allowed\n")

    def do_GET(self) -> None:
        owner = self.server.owner
        began = time.monotonic()
        path = self.path.partition("?")[0]
        host = self.headers.get("Host")
        # Protects against DNS rebinding (`is_local_name`).
        if self.server.is_local and owner.access.token is None and not is_local_name(host):
            self._send(421, "text/plain; charset=utf-8", NOT_CALLED_SO)
            return
        allowed = owner.access.allows(self.headers.get("Authorization"))
        code, content_type, body = owner.answer(path, self.headers.get("Accept", ""), allowed)
        is_sent = False
        try:
            self._send(code, content_type, body)
            # A HEAD request shows no one the final state, for which `linger` waits.
            is_sent = self.command == "GET"
        finally:
            if code == 200:
                owner.note_read(path, began, is_sent, self._is_scraper())

    do_HEAD = do_GET

    def do_POST(self) -> None:
        post = getattr(self.server.owner, "post", None)
        if post is None:
            self._refuse()
            return
        allowed = self.server.owner.access.allows(self.headers.get("Authorization"))
        self._send(*post(self.path, allowed, self.headers.get(HEADER)))

    def _is_scraper(self) -> bool:
        """Return whether the reader identifies itself as Prometheus or a compatible scraper."""
        agent = self.headers.get("User-Agent", "")
        return agent.startswith("Prometheus/") or SCRAPE_TIMEOUT in self.headers

    def _send(self, code: int, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", self.server.owner.policy)
        if code == 405:
            self.send_header("Allow", "GET, HEAD")
        if code == 401:
            self.send_header("WWW-Authenticate", 'Basic realm="tandem", charset="UTF-8"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("metrics: " + format, *args)


def bind(host: str, port: int, owner: Answers, what: str = "metrics") -> WebServer:
    """Listen, if necessary on another port or on loopback, with a warning. Raises OSError."""
    error: Exception | None = None
    # A busy port or a wrong host must not end a training run.
    for try_host, try_port in ((host, port), (host, 0), ("127.0.0.1", 0)):
        try:
            kind = socket.SOCK_STREAM
            flags = socket.AI_PASSIVE
            found = socket.getaddrinfo(try_host or None, try_port, type=kind, flags=flags)
            server = WebServer((str(found[0][4][0]), try_port), found[0][0], owner)
        except (OSError, OverflowError, UnicodeError) as failure:
            error = error or failure
            continue
        if error is not None:
            bound = server.server_address
            logger.warning("%s cannot be served on %s:%s (%s); using %s:%s instead",
                           what, host, port, error, bound[0], bound[1])  # fmt: skip
        return server
    raise OSError(f"{what} cannot be served on any port: {error}")
