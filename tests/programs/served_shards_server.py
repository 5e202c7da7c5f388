"""Serve ranges of the files in a folder, and print a line for each request: python -c TEXT FOLDER PORT."""

import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        path = Path(sys.argv[1]) / Path(self.path).name
        asked = self.headers.get("Range", "")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", asked)
        code, part = 404, b""
        if found and path.is_file():
            first, end, size = int(found[1]), int(found[2]) + 1, path.stat().st_size
            with path.open("rb") as file:
                file.seek(first)
                code, part = 206, file.read(end - first)
        # One write, because threads take turns only between writes.
        print(f"{self.client_address[0]} {path.name} {asked} {code}\n", end="", flush=True)
        self.send_response(code)
        if code == 206:
            self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{size}")
        self.send_header("Content-Length", str(len(part)))
        self.end_headers()
        self.wfile.write(part)


class Server(ThreadingHTTPServer):
    request_queue_size = 256


Server(("", int(sys.argv[2])), Handler).serve_forever()
