"""Servers on loopback that take POST requests, with TLS and with faults, and the certificates for them."""

import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from patience import patient


@dataclass(frozen=True)
class Posted:
    """One request: when it arrived (time.monotonic()), its path, headers (lower case) and JSON."""

    at: float
    path: str
    headers: dict[str, str]
    body: Any


class Receiver:
    """Answers each POST with `answers(number)`: a status, or seconds to hang before it closes."""

    def __init__(
        self, tls: ssl.SSLContext | None = None, answers: Callable[[int], int | float] = lambda number: 200
    ) -> None:
        self.posted: list[Posted] = []
        self.answers = answers
        self._lock = threading.Lock()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                with owner._lock:
                    headers = {name.lower(): value for name, value in self.headers.items()}
                    owner.posted.append(Posted(time.monotonic(), self.path, headers, json.loads(text)))
                    number = len(owner.posted)
                answer = owner.answers(number)
                if isinstance(answer, float):
                    time.sleep(answer)
                    return
                self.send_response(answer)
                if 300 <= answer < 400:
                    self.send_header("Location", "http://127.0.0.1:1/stolen")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # a client that does not trust the certificate

            def get_request(self) -> Any:
                connection, address = super().get_request()
                if tls is not None:
                    connection.settimeout(20)
                    connection = tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
                return connection, address

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    @property
    def bodies(self) -> list[Any]:
        return [each.body for each in self.posted]

    def until(self, count: int, limit: float = 20.0) -> list[Posted]:
        """The requests once there are `count` of them."""
        deadline = time.monotonic() + limit
        while len(self.posted) < count:
            assert time.monotonic() < deadline, f"{len(self.posted)} of {count} requests"
            time.sleep(0.01)
        return self.posted

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Authority:
    """A CA of its own, and a server's certificate from it, for 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        if shutil.which("openssl") is None:
            pytest.skip("openssl is not available here")
        folder.mkdir()
        self.ca = folder / "ca.pem"
        new = ["openssl", "req", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout"]
        self._run(folder, [*new, "ca.key", "-x509", "-subj", "/CN=a CA of a test", "-out", "ca.pem"])
        self._run(folder, [*new[:5], "-keyout", "own.key", "-subj", "/CN=localhost", "-out", "own.csr"])
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        sign = ["openssl", "x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key"]
        self._run(folder, [*sign, "-days", "2", "-CAcreateserial", "-extfile", "names", "-out", "own.pem"])
        self.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.tls.load_cert_chain(folder / "own.pem", folder / "own.key")

    @staticmethod
    def _run(folder: Path, command: list[str]) -> None:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=patient(60))
