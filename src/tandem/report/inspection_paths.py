"""Answer requests to look inside a run over HTTP, for readers with the token, never from another site."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import TandemError
from tandem.report.inspected import memory_text, profile_text, stacks_text
from tandem.telemetry.journal import to_json

PREFIX = "/api/inspect/"
TRACE = "/api/trace"
"""The newest trace that a request here has written."""
HEADER = "X-Tandem"
"""A page of another site cannot send this header without a preflight request, which the server refuses."""
TEXT = "text/plain; charset=utf-8"
Ask = Callable[[str, Mapping[str, float]], dict[str, Any]]
Response = tuple[int, str, bytes]
TEXTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "stacks": stacks_text,
    "profile": profile_text,
    "memory": memory_text,
}


class InspectionPaths:
    """Answers POST requests below PREFIX with {"text": ...}; `ask` is None until an agent sets it."""

    def __init__(self, has_token: bool) -> None:
        self.ask: Ask | None = None
        self._has_token = has_token
        self._trace: Path | None = None

    @property
    def is_open(self) -> bool:
        """Whether a reader with the token gets answers."""
        return self.ask is not None and self._has_token

    def post(self, target: str, header: str | None) -> Response:
        """Return the response to a request whose reader has the token; `target` is path and query."""
        path, _, query = target.partition("?")
        action = path.removeprefix(PREFIX)
        if action not in TEXTS or not path.startswith(PREFIX):
            return 405, TEXT, b"only GET and HEAD are allowed\n"
        if not self._has_token:
            return 403, TEXT, b"this needs a token: start the run with --metrics-token-file\n"
        if header is None:
            return 403, TEXT, f"the header {HEADER} is missing\n".encode()
        if self.ask is None:
            return 503, TEXT, b"no agent answers\n"
        try:
            result = self.ask(action, {name: float(value) for name, value in parse_qsl(query)})
        except (TandemError, ValueError) as error:
            return 409, TEXT, f"{error}\n".encode()
        except Exception as error:  # the store is lost, or a file cannot be written
            return 500, TEXT, f"the request failed: {type(error).__name__}\n".encode()
        if result.get("file"):
            self._trace = Path(result["file"])
        has_trace = action == "profile" and bool(result.get("file"))
        words = {"text": TEXTS[action](result), "trace": TRACE[1:] if has_trace else None}
        return 200, "application/json", (to_json(words) + "\n").encode()

    def trace(self) -> Response:
        """Return the newest trace."""
        try:
            if self._trace is not None and self._has_token:
                return 200, "application/json", self._trace.read_bytes()
        except OSError:  # it was removed
            pass
        return 404, TEXT, b"no trace has been recorded from this page\n"
