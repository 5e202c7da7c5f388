"""A process that serves the files of a folder over http on this machine, with a delay before each answer.

    python benchmarks/range_files.py FOLDER SECONDS

It prints its address, and ends when its stdin is closed. It is the server of tests/range_server.py with HEAD
and ranges without an end, for clients that use them. It reads only what is asked for.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from range_server import Handler, RangeServer

PART = 2**20


class FileHandler(Handler):
    """Answers with a file or a range of it."""

    ranges = True
    """False: a header Range is ignored."""

    def do_HEAD(self) -> None:
        self.reply(with_body=False)

    def do_GET(self) -> None:
        self.reply(with_body=True)

    def reply(self, with_body: bool) -> None:
        time.sleep(self.server.faults.delay)
        path = self.server.root / self.path.partition("?")[0].lstrip("/")
        if not path.is_file():
            return self.answer(404)
        size = path.stat().st_size
        wanted = self.headers.get("Range", "") if self.ranges else ""
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
        first, end = _range(asked, size) if asked else (0, size)
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{end - 1}/{size}")
        self.send_header("Content-Length", str(end - first))
        if self.ranges:
            self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{size}-{path.stat().st_mtime_ns}"')
        self.end_headers()
        if with_body:
            self.send_part(path, first, end)

    def send_part(self, path: Path, first: int, end: int) -> None:
        with path.open("rb") as file:
            file.seek(first)
            while first < end:
                part = file.read(min(PART, end - first))
                first += len(part)
                self.wfile.write(part)


def _range(asked: re.Match[str], size: int) -> tuple[int, int]:
    """Return the first byte and the end of a range; "-N" means the last N bytes."""
    if not asked[1]:
        return max(0, size - int(asked[2])), size
    return int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size


@contextmanager
def served(folder: Path, delay: float) -> Iterator[str]:
    """Serve the files of a folder from another process; yields the address."""
    with started([sys.executable, __file__, str(folder), str(delay)]) as address:
        yield address


@contextmanager
def started(command: Sequence[str]) -> Iterator[str]:
    """Run a server that prints its address and ends with its stdin; yields the address."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def run(server: RangeServer) -> None:
    """Serve until stdin is closed."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.address, flush=True)
    sys.stdin.read()
    server.shutdown()


def main(folder: str, delay: str) -> None:
    with RangeServer(Path(folder)) as server:
        server.RequestHandlerClass = FileHandler
        server.faults.delay = float(delay)
        run(server)


if __name__ == "__main__":
    main(*sys.argv[1:])
