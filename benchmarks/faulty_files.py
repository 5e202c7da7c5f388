"""The server of range_files.py with one fault in its answers about shards.

    python benchmarks/faulty_files.py FOLDER FAULT

FAULT is JSON: "kind", and what that kind needs. 500 and reset: "every", the number of GETs of which the last
one fails; a reset comes in the middle of the body. delay: "seconds" before each answer. stall, 404 and flip:
"shard", the path of a file in FOLDER. A stall is silence in the middle of that file's first body that the
client reads. A flipped bit is at "offset" of the file, in all answers. "no ranges": the header Range is
ignored. Indexes have no fault but the delay.
"""

import json
import socket
import sys
import threading
from pathlib import Path
from typing import Any

from range_files import FileHandler, run
from range_server import RESET, RangeServer

INDEXES = (".json", ".jsonl")
UNREAD_SECONDS = 2.0
"""A client that closes the connection earlier did not want the body: it asked whether there is a file."""


class FaultyServer(RangeServer):
    def __init__(self, root: Path, fault: dict[str, Any]) -> None:
        super().__init__(root)
        self.RequestHandlerClass = FaultyHandler
        self.faults.delay = fault.get("seconds", 0.0)
        self.fault = fault
        self.gets = 0
        """GETs of shards so far."""


class FaultyHandler(FileHandler):
    """Answers as FileHandler, apart from the fault of its server."""

    server: FaultyServer

    def reply(self, with_body: bool) -> None:
        fault = self.server.fault
        self.name = self.path.partition("?")[0].lstrip("/")
        index = self.name.endswith(INDEXES)
        self.kind = "" if index or fault.get("shard", self.name) != self.name else fault["kind"]
        self.ranges = self.kind != "no ranges"
        if self.kind in ("500", "reset", "stall") and not (with_body and self.fails()):
            self.kind = ""
        if self.kind in ("500", "404"):
            return self.refuse(int(self.kind))
        super().reply(with_body)

    def fails(self) -> bool:
        """Count a GET, and return whether it is one that fails."""
        with self.server.lock:
            self.server.gets += 1
            every = self.server.fault.get("every")
            return self.server.gets % every == 0 if every else self.server.gets == 1

    def refuse(self, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_part(self, path: Path, first: int, end: int) -> None:
        if self.kind in ("reset", "stall"):
            super().send_part(path, first, (first + end) // 2)
            if self.kind == "stall":
                return self.stall()
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self.connection.close()
            self.close_connection = True
        elif self.kind == "flip":
            data = bytearray(path.read_bytes())
            data[self.server.fault["offset"]] ^= 1
            self.wfile.write(data[first:end])
        else:
            super().send_part(path, first, end)

    def stall(self) -> None:
        """Send nothing more. If the client does not wait for it, the next answer stalls instead."""
        self.connection.settimeout(UNREAD_SECONDS)
        try:
            self.connection.recv(1)
        except TimeoutError:
            threading.Event().wait()
        except OSError:
            pass
        self.close_connection = True
        with self.server.lock:
            self.server.gets = 0


def main(folder: str, fault: str) -> None:
    with FaultyServer(Path(folder), json.loads(fault)) as server:
        run(server)


if __name__ == "__main__":
    main(*sys.argv[1:])
