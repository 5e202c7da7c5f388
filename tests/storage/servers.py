"""Two object stores on this machine, and the damaging proxy before them."""

import json
import os
import shutil
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from patience import patient

BUCKET = "bucket"
PROXY = Path(__file__).with_name("proxy.py")
SERVERS = ("moto", "s3rver")


def s3rver() -> str | None:
    """The program, from S3RVER_PROGRAM or the PATH."""
    return os.environ.get("S3RVER_PROGRAM") or shutil.which("s3rver")


def wait_for(port: int) -> None:
    deadline = time.monotonic() + patient(60)
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            assert time.monotonic() < deadline, f"nobody listens on {port}"
            time.sleep(0.05)


@dataclass
class ObjectServer:
    """A server with a bucket, behind the proxy; `environment` is what a program needs to reach it."""

    kind: str
    folder: Path
    processes: Any
    ports: list[int]
    control: Path = field(init=False)
    environment: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        port, upstream = self.ports
        self.folder.mkdir(parents=True, exist_ok=True)
        quiet = {"stdout": (self.folder / "server.log").open("w")}
        if self.kind == "moto":
            program = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(upstream)]
        else:
            program = [str(s3rver()), "-d", str(self.folder / "data"), "-a", "127.0.0.1", "-p", str(upstream)]
            program += ["--configure-bucket", BUCKET]
        self.processes.start(program, **quiet)
        self.control = self.folder / "control.json"
        self.control.write_text("{}")
        self.processes.start([sys.executable, str(PROXY), str(port), str(upstream), str(self.control)])
        wait_for(upstream)
        wait_for(port)
        options = {
            "key": "S3RVER",
            "secret": "S3RVER",
            "endpoint_url": f"http://127.0.0.1:{port}",
            "config_kwargs": {"read_timeout": 2, "connect_timeout": 2},
        }
        self.environment = {"FSSPEC_S3": json.dumps(options), "AWS_DEFAULT_REGION": "us-east-1"}
        if self.kind == "moto":
            import fsspec

            fsspec.filesystem("s3", **options).mkdir(BUCKET)

    def damage(self, rule: str, **how: Any) -> None:
        """From now on requests, counted from here, are damaged."""
        self.control.write_text(json.dumps({"rule": rule, "since": self.requests(), **how}))

    def calm(self) -> None:
        self.control.write_text("{}")

    def requests(self) -> int:
        count = self.control.with_suffix(".count")
        return int(count.read_text() or 0) if count.exists() else 0
