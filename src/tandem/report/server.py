"""Node 0's HTTP server for metrics, health and the live page. Read-only, and bounded in every direction."""

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler
from io import BytesIO
from typing import Protocol

from tandem.report.access import OPEN_PATHS, Access, is_local_name
from tandem.report.connections import BoundedServer
from tandem.report.pages import live_page
from tandem.telemetry.journal import to_json
from tandem.telemetry.registry import Registry
from tandem.timeouts import PAGE_SECONDS, REQUEST_SECONDS

logger = logging.getLogger("tandem")

MAX_HEAD_BYTES = 16 * 1024
PATHS = ("/", "/metrics", "/healthz", "/readyz", "/api/run", "/api/history", "/api/about", "/api/log")

NOT_CALLED_SO = (
    b"this page is on loopback, and is not called so; open http://localhost:PORT/, or start the run with "
    b"--metrics-token-file\n"
)


class MetricsServer:
    """Serves PATHS from a thread, from construction to `close`.

    `status()` gives the run as a dict; its keys `healthy` and `ready` (without it: training was reached)
    decide the probes. `history()` gives the curves of the page, `about()` and `log()` what is known of the
    run beside them; the log is for loopback, or for who has the token. Never raises for a busy port or a bad
    host: warns and takes another, see `port`.
    """

    def __init__(
        self,
        metrics: Registry,
        host: str,
        port: int,
        status: Callable[[], Mapping[str, object]],
        history: Callable[[], Mapping[str, object]] = dict,
        access: Access | None = None,
        about: Callable[[], Mapping[str, object]] = dict,
        log: Callable[[], Mapping[str, object]] = dict,
    ) -> None:
        self.metrics = metrics
        self.access = access or Access()
        self._status = status
        self._asked = {"/api/history": history, "/api/about": about, "/api/log": self._own_log}
        self._log = log
        self._last_read = {"/metrics": float("-inf"), "/api/run": float("-inf")}
        self._read_done = threading.Condition()
        self._http = bind(host, port, self)
        self.host, self.port = str(self._http.server_address[0]), int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="tandem-metrics", daemon=True
        )
        self._thread.start()

    @property
    def scraped(self) -> bool:
        """True once somebody has read /metrics."""
        return self._last_read["/metrics"] > float("-inf")

    def scraped_since(self, moment: float) -> bool:
        """True if a whole page was made and sent after `moment` (time.monotonic())."""
        return self._last_read["/metrics"] >= moment

    def linger(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Wait until who looks has seen the final state, or `seconds` passed.

        That is a scraper, if ever there was one, until `stop()`; and a page that is open, for PAGE_SECONDS.
        """
        started = time.monotonic()
        final = self.metrics.final_since
        moment = started if final is None else final
        while self._is_awaited(moment) or (self.scraped and not self.scraped_since(moment) and not stop()):
            left = started + seconds - time.monotonic()
            if left <= 0:
                return
            with self._read_done:
                self._read_done.wait(min(left, 0.1))

    def _is_awaited(self, moment: float) -> bool:
        """Whether a page that was open at `moment` has not asked since, and may yet."""
        asked_before = moment - PAGE_SECONDS < self._last_read["/api/run"] < moment
        return asked_before and time.monotonic() < moment + PAGE_SECONDS

    def close(self) -> None:
        """Stop serving and free the port; safe to call twice."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        """Where it is, as a person types it."""
        return self._http.url

    @property
    def policy(self) -> str:
        return live_page().policy

    def status(self) -> dict[str, object]:
        """The run's status; a status that fails is an unhealthy one, not an error of the server."""
        try:
            return dict(self._status())
        except Exception as error:
            self.metrics.count_error("status")
            return {"healthy": False, "error": f"status is not available: {type(error).__name__}"}

    def answer(self, path: str, accept: str, allowed: bool = True) -> tuple[int, str, bytes]:
        """HTTP status, content type and body for a path; `allowed`: the reader has the token."""
        if not allowed and path not in OPEN_PATHS:
            return 401, "text/plain; charset=utf-8", b"the token is needed, as bearer or password\n"
        if path == "/metrics":
            page, content_type = self.metrics.negotiate(accept)
            return 200, content_type, page
        if path == "/":
            return 200, "text/html; charset=utf-8", live_page().html
        if path in self._asked:
            return 200, "application/json", (to_json(dict(self._asked[path]())) + "\n").encode()
        if path not in PATHS:
            return 404, "text/plain; charset=utf-8", f"not found; here are {', '.join(PATHS)}\n".encode()
        status = self.status()
        good = True
        if path == "/healthz":
            good = bool(status.get("healthy"))
        elif path == "/readyz":
            good = bool(status.get("ready", self.metrics.training_started))
        shown: object = status if allowed else {"good": good}
        return 200 if good else 503, "application/json", (to_json(shown) + "\n").encode()

    def _own_log(self) -> Mapping[str, object]:
        if self._http.is_local or self.access.token is not None:
            return self._log()
        return {"why": "the log is shown on loopback, or with --metrics-token-file to who has the token"}

    def note_read(self, path: str, moment: float) -> None:
        """An answer whose making began at `moment` was sent."""
        if path in self._last_read:
            with self._read_done:
                self._last_read[path] = max(self._last_read[path], moment)
                self._read_done.notify_all()


class Answers(Protocol):
    """Who knows what is served: its answers, the Content-Security-Policy they go with, and who may ask."""

    access: Access

    @property
    def policy(self) -> str: ...

    def answer(self, path: str, accept: str, allowed: bool = True) -> tuple[int, str, bytes]: ...

    def note_read(self, path: str, moment: float) -> None: ...


class WebServer(BoundedServer):
    """The server as its handler sees it."""

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, owner: Answers) -> None:
        self.owner = owner
        self.is_local = ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
        super().__init__(address, family, _Handler, owner.access.tls)

    @property
    def url(self) -> str:
        """Where it is, as a person types it."""
        host, port = str(self.server_address[0]), self.server_address[1]
        scheme = "https" if self.owner.access.tls is not None else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


class _Handler(BaseHTTPRequestHandler):
    """One request per connection, its head read whole within size and time limits before it is parsed."""

    server: WebServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "tandem", ""

    def handle(self) -> None:
        head = self._read_head()
        self.server.heard(self.connection)
        if head is not None:
            self.rfile = BytesIO(head)
            self.handle_one_request()

    def _read_head(self) -> bytes | None:
        deadline, head = time.monotonic() + REQUEST_SECONDS, b""
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
        # http.server looks methods up by name and answers 501 itself where there is none.
        if name.startswith("do_"):
            return self._refuse
        raise AttributeError(name)

    def _refuse(self) -> None:
        self._send(405, "text/plain; charset=utf-8", b"only GET and HEAD\n")

    def do_GET(self) -> None:
        owner, began = self.server.owner, time.monotonic()
        path = self.path.partition("?")[0]
        host = self.headers.get("Host")
        if self.server.is_local and owner.access.token is None and not is_local_name(host):
            self._send(421, "text/plain; charset=utf-8", NOT_CALLED_SO)
            return
        allowed = owner.access.allows(self.headers.get("Authorization"))
        code, content_type, body = owner.answer(path, self.headers.get("Accept", ""), allowed)
        self._send(code, content_type, body)
        if self.command == "GET" and code == 200:
            owner.note_read(path, began)

    do_HEAD = do_GET

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
    """Listen, if need be on another port or on loopback, with a warning. Raises OSError."""
    error: Exception | None = None
    for try_host, try_port in ((host, port), (host, 0), ("127.0.0.1", 0)):
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            found = socket.getaddrinfo(try_host or None, try_port, type=kind, flags=flags)
            server = WebServer((str(found[0][4][0]), try_port), found[0][0], owner)
        except (OSError, OverflowError, UnicodeError) as failure:
            error = error or failure
            continue
        if error is not None:
            bound = server.server_address
            logger.warning("%s cannot be served on %s:%s (%s), but on %s:%s instead",
                           what, host, port, error, bound[0], bound[1])  # fmt: skip
        return server
    raise OSError(f"{what} cannot be served on any port: {error}")
