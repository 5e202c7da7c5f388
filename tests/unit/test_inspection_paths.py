"""The page's buttons: only with the token, never from another site, and a refusal is one line."""

import http.client
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from patience import patient
from tandem.errors import ConfigError
from tandem.report.server import MetricsServer
from tandem.report.web import Access
from tandem.telemetry.registry import Registry

PAGE = {"Authorization": "Bearer word", "X-Tandem": "page"}


class Asked:
    """What an agent is asked for; its trace is in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.requests: list[tuple[str, dict[str, float]]] = []

    def __call__(self, action: str, options: Mapping[str, float]) -> dict[str, Any]:
        self.requests.append((action, dict(options)))
        if action == "memory":
            raise ConfigError("another memory request is running")
        result: dict[str, Any] = {"answers": [{"rank": 3, "node": 1, "error": "no answer"}]}
        if action == "profile":
            (self.folder / "trace.json").write_text('{"traceEvents": []}')
            facts = {"first": 4, "last": 8, "clock_uncertainty_us": 0.0}
            result |= {"file": str(self.folder / "trace.json"), **facts}
        return result


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    return Asked(tmp_path)


@pytest.fixture
def server(asked: Asked) -> Iterator[MetricsServer]:
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: {"healthy": True}, access=Access("word"))
    server.inspection.ask = asked
    yield server
    server.close()


def send(server: MetricsServer, path: str, method: str = "POST", **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patient(20))
    try:
        connection.request(method, path, headers={name.replace("_", "-"): v for name, v in headers.items()})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_without_the_token_nothing_is_asked(server: MetricsServer, asked: Asked) -> None:
    for path in ("/api/inspect/stacks", "/api/inspect/profile?steps=5", "/api/inspect/memory", "/x"):
        assert send(server, path, X_Tandem="page")[0] == 401
        assert send(server, path, X_Tandem="page", Authorization="Bearer wrong")[0] == 401
    assert send(server, "/api/trace", "GET")[0] == 401
    # A browser adds the password of Basic authentication also to forms of another site.
    assert send(server, "/api/inspect/stacks", Authorization="Bearer word")[0] == 403
    assert asked.requests == []


def test_with_the_token_the_ranks_are_asked(server: MetricsServer, asked: Asked) -> None:
    code, body = send(server, "/api/inspect/stacks", **PAGE)
    assert code == 200 and "no answer" in json.loads(body)["text"] and json.loads(body)["trace"] is None
    assert send(server, "/api/trace", "GET", **PAGE)[0] == 404
    code, body = send(server, "/api/inspect/profile?steps=7", **PAGE)
    assert code == 200 and json.loads(body)["trace"] == "api/trace"
    assert asked.requests == [("stacks", {}), ("profile", {"steps": 7.0})]
    assert send(server, "/api/trace", "GET", **PAGE) == (200, b'{"traceEvents": []}')
    assert json.loads(send(server, "/api/run", "GET", **PAGE)[1])["inspection"] is True


def test_a_refusal_is_one_line(server: MetricsServer) -> None:
    for path, wanted in (
        ("/api/inspect/memory?seconds=3", 409),
        ("/api/inspect/profile?steps=many", 409),
        ("/api/inspect/nothing", 405),
        ("/metrics", 405),
    ):
        code, body = send(server, path, **PAGE)
        assert code == wanted and len(body.splitlines()) == 1, body

    def lost(action: str, options: Mapping[str, float]) -> dict[str, Any]:
        raise RuntimeError("the store is lost")

    server.inspection.ask = lost
    assert send(server, "/api/inspect/stacks", **PAGE)[0] == 500
    server.inspection.ask = None
    assert send(server, "/api/inspect/stacks", **PAGE)[0] == 503


def test_a_run_without_a_token_has_no_buttons(asked: Asked) -> None:
    server = MetricsServer(Registry(), "127.0.0.1", 0, lambda: {"healthy": True})
    server.inspection.ask = asked
    try:
        code, body = send(server, "/api/inspect/stacks", X_Tandem="page")
        assert code == 403 and b"--metrics-token-file" in body
        assert "inspection" not in json.loads(send(server, "/api/run", "GET")[1])
    finally:
        server.close()
    assert asked.requests == []
