"""Send small JSON documents to a server from a thread, so that no other code waits for that server.

Node 0's agent uses it for a webhook (`notify.py`) and the platform's status endpoint (`trainer_status.py`).
"""

import http.client
import logging
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message as Headers
from functools import partial
from typing import Any

from tandem.telemetry import metrics
from tandem.telemetry.journal import to_json
from tandem.telemetry.messages import Samples, Send
from tandem.timeouts import OUTGOING_ARRIVAL_SECONDS, OUTGOING_REQUEST_SECONDS, OUTGOING_RETRY_SECONDS

log = logging.getLogger("tandem.node")

ATTEMPTS = 3
"""Attempts to send one document; a document that a newer one replaces is not sent again."""


@dataclass(frozen=True)
class HttpRequest:
    """One POST request: its address, headers, and certificates (None: the system's)."""

    url: str
    body: object
    headers: Mapping[str, str] = field(default_factory=dict)
    tls: ssl.SSLContext | None = None


Make = Callable[[], HttpRequest]
"""Creates a request when it is sent; OSError or ValueError count as a failed attempt."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect, which would repeat the credentials or the text to another server."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Headers, newurl: str
    ) -> None:
        return None


class _NotedConnection(http.client.HTTPSConnection):
    """Calls `note` when the request has been sent, before it waits for the answer."""

    def __init__(self, note: Callable[[], None], *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._note = note

    def getresponse(self) -> http.client.HTTPResponse:
        self._note()
        return super().getresponse()


class _NotedHandler(urllib.request.HTTPSHandler):
    def __init__(self, note: Callable[[], None], tls: ssl.SSLContext | None) -> None:
        super().__init__(context=tls)
        self._connection = partial(_NotedConnection, note, context=tls)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connection, req)


class HttpSender:
    """Sends documents to one server, in order, from a thread that begins with the first one.

    `to` names the server in the metric and the log. Requests are at least `pause` seconds apart: over https,
    from when one has arrived, because an answer may take long. If more than `most` documents wait, the newest
    are kept; with 1, only the last state counts. After an answer of 429 or 5xx, or no answer, it tries again,
    ATTEMPTS times in all. Failures are counted, and logged once.
    """

    def __init__(
        self, to: str, count: Send, most: int, pause: float = 0.0, uses_proxy: bool = True,
        timeout: float = OUTGOING_REQUEST_SECONDS,
    ) -> None:  # fmt: skip
        self._to = to
        self._count = count
        self._pause = pause
        self._timeout = timeout
        self._uses_proxy = uses_proxy
        self._waiting: deque[tuple[Make, Callable[[], object]]] = deque(maxlen=most)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_sending = False
        self._is_closed = False
        self._has_failed = False
        self._not_before = 0.0
        self._sent_at: float | None = None

    def put(self, make: Make, sent: Callable[[], object] = lambda: None) -> None:
        """Send what `make` returns, as soon as allowed, and then call `sent`; returns at once."""
        with self._changed:
            if self._is_closed:
                return
            self._waiting.append((make, sent))
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=f"tandem-{self._to}", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def flush(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all documents are sent or given up; False after `seconds`, or once `is_over()`."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._is_sending:
                left = deadline - time.monotonic()
                if left <= 0 or is_over():
                    return False
                # Wake up often, because a signal, which ends this wait early, does not notify the condition.
                self._changed.wait(min(left, 0.1))
        return True

    def close(self) -> None:
        """Send nothing more. A request in progress is abandoned with the process."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._deliver(*item)
            finally:
                with self._changed:
                    self._is_sending = False
                    self._changed.notify_all()

    def _next(self) -> tuple[Make, Callable[[], object]] | None:
        with self._changed:
            while not self._is_closed:
                wait = self._not_before - time.monotonic()
                if self._waiting and wait <= 0:
                    self._is_sending = True
                    return self._waiting.popleft()
                self._changed.wait(wait if self._waiting else None)
        return None

    def _deliver(self, make: Make, sent: Callable[[], object]) -> None:
        for attempt in range(1, ATTEMPTS + 1):
            self._sent_at = None
            problem, is_worth_another = self._try(make)
            ended = time.monotonic()
            # A busy server may see a request a little later than it was sent.
            self._not_before = min(ended, (self._sent_at or ended) + OUTGOING_ARRIVAL_SECONDS) + self._pause
            outcome = "failed" if problem else "sent"
            self._count(Samples([metrics.OUTGOING_REQUESTS.inc(to=self._to, outcome=outcome)]))
            if not problem:
                sent()
                return
            if not self._has_failed:
                self._has_failed = True
                log.warning("the %s did not take a message (%s); training is not affected", self._to, problem)
            if not is_worth_another or attempt == ATTEMPTS or self._is_replaced_after(attempt):
                return

    def _is_replaced_after(self, attempt: int) -> bool:
        """Wait before another attempt; return True if the attempt is no longer worthwhile."""
        deadline = max(self._not_before, time.monotonic() + OUTGOING_RETRY_SECONDS * 2 ** (attempt - 1))
        with self._changed:
            while (left := deadline - time.monotonic()) > 0 and not self._is_closed:
                self._changed.wait(left)
            # With a full queue, another attempt would keep out a newer document.
            return self._is_closed or len(self._waiting) == self._waiting.maxlen

    def _note_sent(self) -> None:
        self._sent_at = time.monotonic()

    def _try(self, make: Make) -> tuple[str, bool]:
        """Send one request; return (the error, or "", and whether a retry may succeed)."""
        try:
            request = make()
            data = to_json(request.body).encode()
            headers = {"Content-Type": "application/json", "User-Agent": "tandem", **request.headers}
            asked = urllib.request.Request(request.url, data, headers, method="POST")
            handlers = [_NoRedirect(), _NotedHandler(self._note_sent, request.tls)]
            if not self._uses_proxy:
                # Without this handler, urllib uses the proxy that the environment names.
                handlers.append(urllib.request.ProxyHandler({}))
            with urllib.request.build_opener(*handlers).open(asked, timeout=self._timeout):
                return "", False
        except urllib.error.HTTPError as error:
            with error:
                # Too many requests, and the server's own failures, may pass; any other status would recur.
                return f"HTTP status {error.code}", error.code == 429 or error.code >= 500
        except urllib.error.URLError as error:
            return _reason(error.reason), True
        # Do not use the text of these errors: it may quote the address.
        except (http.client.HTTPException, ValueError) as error:
            return type(error).__name__, False
        except OSError as error:
            return _reason(error), True


def _reason(error: object) -> str:
    """Return the error's text without the address, which may contain a secret."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {error.verify_message}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return type(error).__name__
