"""A server of files on loopback that knows ranges, and does damage on purpose."""

import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

RESET = struct.pack("ii", 1, 0)


class Faults:
    """What goes wrong. Shares are of the requests, drawn from a generator with a seed; names are files."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.share_500 = 0.0
        self.share_resets = 0.0
        self.share_flipped = 0.0
        self.always_500: set[str] = set()
        self.missing: set[str] = set()
        self.flipped: set[str] = set()
        self.stalling: set[str] = set()
        self.stalls_once = False
        self.no_ranges = False
        self.in_chunks = False
        """Answers come with `Transfer-Encoding: chunked`, without a length."""
        self.redirect_to = ""
        self.draw = random.Random(0)


class RangeServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.faults = Faults()
        self.lock = threading.Lock()
        self.requests: Counter[str] = Counter()
        """"NAME RANGE" of every request."""
        self.answers: Counter[str] = Counter()
        """What was answered: "whole", "flipped", "reset", "stall" or a code."""
        self.sent = 0
        """Bytes of ranges in complete answers, flipped or not."""
        self.stalled: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that was killed is no news."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: RangeServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        name = self.path.partition("?")[0].lstrip("/")
        faults = self.server.faults
        asked = self.headers.get("Range", "")
        with self.server.lock:
            self.server.requests[f"{name} {asked}"] += 1
            draws = faults.draw.random(), faults.draw.random(), faults.draw.random()
        time.sleep(faults.delay)
        path = self.server.root / name
        if faults.redirect_to:
            self.send_response(302)
            self.send_header("Location", f"{faults.redirect_to}/{name}")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if name in faults.always_500 or draws[0] < faults.share_500:
            return self.answer(500)
        if name in faults.missing or not path.is_file():
            return self.answer(404)
        data = path.read_bytes()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        if found is None or faults.no_ranges:
            return self.answer(200, data)
        begin, end = int(found[1]), min(int(found[2]) + 1, len(data))
        if begin >= len(data):
            return self.answer(416)
        part = bytearray(data[begin:end])
        flips = name in faults.flipped or draws[2] < faults.share_flipped
        if flips:
            part[len(part) // 2] ^= 1
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        if faults.in_chunks:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            return self.chunks(bytes(part))
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.body(name, bytes(part), "flipped" if flips else "whole", draws[1] < faults.share_resets)

    def body(self, name: str, part: bytes, kind: str, resets: bool) -> None:
        if resets:
            self.count("reset")
            self.wfile.write(part[: len(part) // 2])
            self.wfile.flush()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.connection.close()
            self.close_connection = True
            return
        if name in self.server.faults.stalling:
            with self.server.lock:
                first = name not in self.server.stalled
                self.server.stalled.add(name)
            if first or not self.server.faults.stalls_once:
                self.count("stall")
                self.wfile.write(part[: len(part) // 2])
                time.sleep(60)
        # Counted before it is sent, so that a client that has the answer finds it counted.
        self.count(kind, len(part))
        self.wfile.write(part)

    def chunks(self, part: bytes) -> None:
        self.count("whole", len(part))
        for begin in range(0, len(part), 5000):
            chunk = part[begin : begin + 5000]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        self.wfile.write(b"0\r\n\r\n")

    def count(self, kind: str, size: int = 0) -> None:
        with self.server.lock:
            self.server.answers[kind] += 1
            self.server.sent += size

    def answer(self, code: int, body: bytes = b"nothing") -> None:
        self.count(str(code))
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(root: Path) -> Iterator[RangeServer]:
    with RangeServer(root) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
