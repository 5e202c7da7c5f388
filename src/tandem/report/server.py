"""Run node 0's HTTP server for metrics, health and the live page, with limits on everything.

Read-only, except that a reader with the token may look inside the ranks (`inspection.py`).
"""

import threading
import time
from collections.abc import Callable, Mapping

from tandem.report.inspection import TRACE, InspectionPaths
from tandem.report.pages import live_page
from tandem.report.web import OPEN_PATHS, Access, bind
from tandem.telemetry.journal import to_json
from tandem.telemetry.registry import Registry
from tandem.timeouts import HOLD_SECONDS, PAGE_SECONDS

MOST_HELD = 8
"""Maximum number of pages, of MAX_CONNECTIONS, with a connection that is held until the end; others poll."""
PATHS = (
    "/",
    "/metrics",
    "/healthz",
    "/readyz",
    "/api/run",
    "/api/history",
    "/api/about",
    "/api/log",
    "/api/end",
    TRACE,
)
NO_TOKEN = 401, "text/plain; charset=utf-8", b"token required, as a bearer token or password\n"


class MetricsServer:
    """Serves PATHS from a thread, from construction to `close`.

    `status()` returns the run's status as a dict. Its keys `healthy` and `ready` (default: training was
    reached) decide the probes. `history()` returns the page's curves; `about()` and `log()` return other
    facts. The log is served only on loopback, or to readers with the token. A busy port or an invalid host
    never raises: a warning is logged and another port or host is used, see `port`.
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
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self.metrics = metrics
        self._hold_seconds = hold_seconds
        self.access = access or Access()
        self.inspection = InspectionPaths(self.access.token is not None)
        self._status = status
        self._asked = {
            "/api/history": history,
            "/api/about": about,
            "/api/log": self._own_log,
            "/api/end": self.end,
        }
        self._log = log
        self._last_read = {"/metrics": float("-inf"), "/api/run": float("-inf")}
        self._read_done = threading.Condition()
        self._held = 0
        self._is_closing = False
        self._http = bind(host, port, self)
        self.url = self._http.url
        self.host, self.port = str(self._http.server_address[0]), int(self._http.server_address[1])
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.1,), name="tandem-metrics", daemon=True
        )
        self._thread.start()

    @property
    def scraped(self) -> bool:
        """True once Prometheus has read /metrics. A read by curl does not count."""
        return self._last_read["/metrics"] > float("-inf")

    def scraped_since(self, moment: float) -> bool:
        """Return True if a page was generated and sent completely after `moment` (time.monotonic())."""
        return self._last_read["/metrics"] >= moment

    def linger(
        self, seconds: float, stop: Callable[[], bool] = lambda: False, page_seconds: float = PAGE_SECONDS
    ) -> None:
        """Wait until readers have seen the final state, or until `seconds` have passed.

        Waits for a scraper, if there ever was one, until `stop()` returns True. Waits `page_seconds` for an
        open page if its connection is held (`end`) or it has just requested /api/run.
        """
        started = time.monotonic()
        final = self.metrics.final_since
        moment = started if final is None else final
        while self._is_awaited(moment, page_seconds) or (
            self.scraped and not self.scraped_since(moment) and not stop()
        ):
            left = started + seconds - time.monotonic()
            if left <= 0:
                return
            with self._read_done:
                self._read_done.wait(min(left, 0.1))

    def _is_awaited(self, moment: float, seconds: float) -> bool:
        """Return True if a page that was open at `moment` has sent no request since, and still may."""
        asked_before = moment - seconds < self._last_read["/api/run"] < moment
        return (asked_before or self._held > 0) and time.monotonic() < moment + seconds

    def end(self) -> Mapping[str, object]:
        """Wait until the run is over; return everything that the page shows about it.

        There may be no second response. Empty after `hold_seconds`, and immediately if MOST_HELD others
        already wait, because threads are limited.
        """
        deadline = time.monotonic() + self._hold_seconds
        with self._read_done:
            # `note_read` lowers it once the response is sent, or could not be sent.
            self._held += 1
            has_room = self._held <= MOST_HELD  # decided once: a later page must not end an earlier one
            while self.metrics.final_since is None:
                left = deadline - time.monotonic()
                if left <= 0 or not has_room or self._is_closing:
                    return {}
                # Wait in short intervals, because the registry does not notify this condition when the run
                # ends.
                self._read_done.wait(min(left, 0.1))
        return {"run": self.status(), "history": self._asked["/api/history"](), "log": self._own_log()}

    def close(self) -> None:
        """Stop serving and free the port; safe to call twice."""
        self._is_closing = True
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.server_close()

    @property
    def policy(self) -> str:
        return live_page().policy

    def status(self) -> dict[str, object]:
        """Return the run's status; if that fails, an unhealthy status instead of a server error."""
        try:
            return {**self._status(), **({"inspection": True} if self.inspection.is_open else {})}
        except Exception as error:
            self.metrics.count_error("status")
            return {"healthy": False, "error": f"status is not available: {type(error).__name__}"}

    def answer(self, path: str, accept: str, allowed: bool = True) -> tuple[int, str, bytes]:
        """Return HTTP status, content type and body for a path; `allowed`: the reader has the token."""
        if not allowed and path not in OPEN_PATHS:
            return NO_TOKEN
        if path == "/metrics":
            page, content_type = self.metrics.negotiate(accept)
            return 200, content_type, page
        if path == "/":
            return 200, "text/html; charset=utf-8", live_page().html
        if path == TRACE:
            return self.inspection.trace()
        if path in self._asked:
            return 200, "application/json", (to_json(dict(self._asked[path]())) + "\n").encode()
        if path not in PATHS:
            return 404, "text/plain; charset=utf-8", f"not found; available: {', '.join(PATHS)}\n".encode()
        return self._health_answer(path, allowed)

    def _health_answer(self, path: str, allowed: bool) -> tuple[int, str, bytes]:
        status = self.status()
        good = True
        if path == "/healthz":
            good = bool(status.get("healthy"))
        elif path == "/readyz":
            good = bool(status.get("ready", self.metrics.training_started))
        shown: object = status if allowed else {"good": good}
        return 200 if good else 503, "application/json", (to_json(shown) + "\n").encode()

    def post(self, target: str, allowed: bool, header: str | None) -> tuple[int, str, bytes]:
        """Return the response to a POST request; `allowed`: the reader has the token."""
        if not allowed:
            return NO_TOKEN
        return self.inspection.post(target, header)

    def _own_log(self) -> Mapping[str, object]:
        # A program may print anything, including secrets.
        if self._http.is_local or self.access.token is not None:
            return self._log()
        return {
            "why": "the log is shown only on loopback, or with --metrics-token-file to readers with the token"
        }

    def note_read(self, path: str, moment: float, is_sent: bool = True, is_scraper: bool = False) -> None:
        """Record that a response, generated from `moment` on, was sent or could not be sent.

        `is_scraper`: the reader is Prometheus. Other readers of /metrics are not recorded.
        """
        if path == "/api/end":
            with self._read_done:
                self._held -= 1
                self._read_done.notify_all()
        elif path in self._last_read and is_sent and (is_scraper or path != "/metrics"):
            with self._read_done:
                self._last_read[path] = max(self._last_read[path], moment)
                self._read_done.notify_all()
