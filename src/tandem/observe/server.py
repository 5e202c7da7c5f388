"""Node 0's HTTP server for metrics and health, and the datagram socket over which rank 0 feeds it."""

import json
import logging
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from socketserver import TCPServer, ThreadingMixIn
from typing import Any

from tandem.observe.journal import to_json
from tandem.observe.metrics import Metrics

logger = logging.getLogger("tandem")

MAX_CONNECTIONS = 32
MAX_HEAD_BYTES = 16 * 1024
REQUEST_SECONDS = 5.0
MAX_MESSAGE_BYTES = 64 * 1024
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
)

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>tandem</title>
<meta name="viewport" content="width=device-width"><meta name="color-scheme" content="light dark"><style>
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
#top{display:flex;flex-wrap:wrap;gap:1rem;margin:1rem 0}#top div{flex:1 1 9rem;padding:.6rem 1rem;
border:1px solid #8886;border-radius:.5rem}#top b{display:block;font-size:1.5rem;overflow-wrap:anywhere}
progress{width:100%}table{border-collapse:collapse;width:100%}
td{padding:.2rem .5rem;border-bottom:1px solid #8884;overflow-wrap:anywhere}#note{color:#c33}
</style></head><body><h1 id="title">tandem</h1><p id="note" role="status"></p>
<progress id="bar" max="1" value="0" aria-label="steps done"></progress>
<div id="top"></div><table><tbody id="rest"></tbody></table>
<p><a href="metrics">metrics</a> <a href="api/run">api/run</a></p><script>
const $ = id => document.getElementById(id);
const show = v => v == null ? "–" : typeof v === "object" ? JSON.stringify(v)
  : typeof v === "number" && !Number.isInteger(v) ? String(+v.toPrecision(5)) : String(v);
function add(parent, tag, text) {
  const e = document.createElement(tag); e.textContent = text; parent.append(e); return e;
}
function draw(run) {
  const step = run.global_step ?? run.step, top = $("top"), rest = $("rest");
  top.replaceChildren(); rest.replaceChildren();
  const cards = {state: run.state, step: show(step) + (run.steps_planned ? " / " + run.steps_planned : ""),
                 loss: run.loss, "samples/s": run.samples_per_second};
  for (const [name, value] of Object.entries(cards)) {
    const card = add(top, "div", name); add(card, "b", show(value));
  }
  if (run.steps_planned) $("bar").value = step / run.steps_planned;
  for (const [name, value] of Object.entries(run)) {
    const row = add(rest, "tr", ""); add(row, "td", name); add(row, "td", show(value));
  }
  document.title = $("title").textContent = "tandem" + (run.task ? " " + run.task : "");
}
async function refresh() {
  try {
    draw(await (await fetch("api/run", {cache: "no-store"})).json()); $("note").textContent = "";
  } catch (error) { $("note").textContent = "No answer from the run; these are its last values."; }
  setTimeout(refresh, 2000);
}
refresh();
</script></body></html>
"""


class MetricsServer:
    """Serves /metrics, /healthz, /readyz, /api/run and / from a thread, from construction to `close`.

    `status()` gives the run as a dict; its keys `healthy` and `ready` (without it: training was reached)
    decide the probes. Never raises for a busy port or a bad host: warns and takes another, see `port`.
    """

    def __init__(
        self, metrics: Metrics, host: str, port: int, status: Callable[[], Mapping[str, object]]
    ) -> None:
        self.metrics = metrics
        self._status = status
        self._last_scrape = float("-inf")
        self._scrape_done = threading.Condition()
        self._http = _bind(host, port, self)
        self.host, self.port = str(self._http.server_address[0]), int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="tandem-metrics", daemon=True
        )
        self._thread.start()

    @property
    def scraped(self) -> bool:
        """True once somebody has read /metrics."""
        return self._last_scrape > float("-inf")

    def scraped_since(self, moment: float) -> bool:
        """True if a whole page was made and sent after `moment` (time.monotonic())."""
        return self._last_scrape >= moment

    def linger(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> None:
        """If ever scraped, wait until a scrape has seen the final state, `seconds` passed or `stop()`."""
        started = time.monotonic()
        final = self.metrics.final_since
        moment = started if final is None else final
        while self.scraped and not self.scraped_since(moment) and not stop():
            left = started + seconds - time.monotonic()
            if left <= 0:
                return
            with self._scrape_done:
                self._scrape_done.wait(min(left, 0.1))

    def close(self) -> None:
        """Stop serving and free the port; safe to call twice."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    def status(self) -> dict[str, object]:
        """The run's status; a status that fails is an unhealthy one, not an error of the server."""
        try:
            return dict(self._status())
        except Exception as error:
            self.metrics.count_error("status")
            return {"healthy": False, "error": f"status is not available: {type(error).__name__}"}

    def answer(self, path: str, accept: str) -> tuple[int, str, bytes]:
        """HTTP status, content type and body for a path."""
        if path == "/metrics":
            page, content_type = self.metrics.negotiate(accept)
            return 200, content_type, page
        if path == "/":
            return 200, "text/html; charset=utf-8", PAGE.encode()
        if path not in ("/healthz", "/readyz", "/api/run"):
            known = "/, /metrics, /healthz, /readyz, /api/run"
            return 404, "text/plain; charset=utf-8", f"not found; here are {known}\n".encode()
        status = self.status()
        good = True
        if path == "/healthz":
            good = bool(status.get("healthy"))
        elif path == "/readyz":
            good = bool(status.get("ready", self.metrics.training_started))
        return 200 if good else 503, "application/json", (to_json(status) + "\n").encode()

    def note_scrape(self, moment: float) -> None:
        """A page whose making began at `moment` was sent."""
        with self._scrape_done:
            self._last_scrape = max(self._last_scrape, moment)
            self._scrape_done.notify_all()


class _HTTPServer(ThreadingMixIn, HTTPServer):
    """At most MAX_CONNECTIONS threads; more clients wait in the kernel's queue, nobody is turned away."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_port = False  # two runs must not share a port silently
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily, owner: MetricsServer) -> None:
        self.address_family = family
        self.owner = owner
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer's asks DNS for the host's name, which can hang

    def get_request(self) -> tuple[socket.socket, Any]:
        if not self._slots.acquire(timeout=0.2):
            raise OSError("all connections are in use")  # serve_forever comes back to it
        try:
            return super().get_request()
        except OSError:
            self._slots.release()
            time.sleep(0.01)  # out of file descriptors: do not spin
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("metrics: a client went away or sent garbage", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One request per connection, its head read whole within size and time limits before it is parsed."""

    server: _HTTPServer
    timeout = REQUEST_SECONDS
    server_version, sys_version = "tandem", ""

    def handle(self) -> None:
        head = self._read_head()
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
        self._send(405, "text/plain; charset=utf-8", b"only GET and HEAD\n", allow=True)

    def do_GET(self) -> None:
        owner, began = self.server.owner, time.monotonic()
        path = self.path.partition("?")[0]
        code, content_type, body = owner.answer(path, self.headers.get("Accept", ""))
        self._send(code, content_type, body)
        if path == "/metrics" and self.command == "GET":
            owner.note_scrape(began)

    do_HEAD = do_GET

    def _send(self, code: int, content_type: str, body: bytes, allow: bool = False) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        if allow:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("metrics: " + format, *args)


def _bind(host: str, port: int, owner: MetricsServer) -> _HTTPServer:
    error: Exception | None = None
    for try_host, try_port in ((host, port), (host, 0), ("127.0.0.1", 0)):
        try:
            kind, flags = socket.SOCK_STREAM, socket.AI_PASSIVE
            found = socket.getaddrinfo(try_host or None, try_port, type=kind, flags=flags)
            server = _HTTPServer((str(found[0][4][0]), try_port), found[0][0], owner)
        except (OSError, OverflowError, UnicodeError) as failure:
            error = error or failure
            continue
        if error is not None:
            bound = server.server_address
            logger.warning("metrics cannot be served on %s:%s (%s); they are on %s:%s instead",
                           host, port, error, bound[0], bound[1])  # fmt: skip
        return server
    raise OSError(f"metrics cannot be served on any port: {error}")


class SampleReceiver:
    """Binds a Unix datagram socket at `path` and calls `on_message(dict)` from a thread until `close`.

    What is malformed, or makes `on_message` raise, is counted in `malformed` and told to `on_error`
    (with "datagram"). Raises OSError if the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        on_message: Callable[[dict[str, object]], None],
        on_error: Callable[[str], None] | None = None,
    ) -> None:
        self.malformed = 0
        self._path, self._on_message, self._on_error = path, on_message, on_error
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()  # left over by a killed agent
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            _at_path(path, self._socket.bind)
            path.chmod(0o600)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(0.1)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandem-samples", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take what is still queued, then remove the socket; safe to call twice."""
        self._closing.set()
        self._thread.join()
        self._socket.close()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            try:
                self._take(self._socket.recv(MAX_MESSAGE_BYTES + 1))
            except TimeoutError:
                if closing:
                    return
            except OSError:
                return

    def _take(self, datagram: bytes) -> None:
        try:
            message = json.loads(datagram) if len(datagram) <= MAX_MESSAGE_BYTES else None
            if not isinstance(message, dict):
                raise ValueError("not a message")
            self._on_message(message)
        except Exception:  # whatever came in, the next sample must still be read
            logger.debug("metrics: a bad datagram", exc_info=True)
            self.malformed += 1
            if self._on_error is not None:
                self._on_error("datagram")


class SampleSender:
    """Sends dicts to the SampleReceiver at `path`; never raises, never waits, drops what cannot go."""

    def __init__(self, path: Path) -> None:
        self.dropped = 0
        self._path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def send(self, message: Mapping[str, object]) -> bool:
        """True if the message is in the receiver's queue. NaN travels as Python's JSON spells it."""
        with self._lock:
            try:
                data = json.dumps(message, separators=(",", ":")).encode()
                if len(data) > MAX_MESSAGE_BYTES:
                    raise ValueError("too long")
                self._send(data)
                return True
            except (OSError, ValueError, TypeError, RecursionError):
                self.dropped += 1
                return False

    def close(self) -> None:
        with self._lock:
            self._disconnect()

    def _send(self, data: bytes) -> None:
        if self._socket is not None:
            try:
                self._socket.send(data)
                return
            except (ConnectionError, FileNotFoundError):  # the receiver is another one now
                self._disconnect()
        self._connect().send(data)

    def _connect(self) -> socket.socket:
        new = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
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
    """Call `use` with a name of `path` that fits a socket address, which holds 107 bytes."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        use(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)
