"""What image and cluster are described by, without an engine: locks, variables, commands, help."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from tandem.config import VARIABLES

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "compose"), str(ROOT / "docker")]

from cpu_lock import cpu_lock  # noqa: E402

from engine import ClusterError  # noqa: E402
from network import Shape  # noqa: E402

# The cluster decides these itself: places, ports, folders, and the grace period that Compose has to exceed.
DECIDED = "DATA_DIR RUN_DIR NODES NODE_RANK MASTER METRICS_HOST METRICS_PORT SHUTDOWN_TIMEOUT".split()


def test_every_setting_reaches_the_containers() -> None:
    text = (ROOT / "compose" / "compose.yaml").read_text(encoding="utf-8")
    wanted = [name for name in VARIABLES if name.removeprefix("TANDEM_") not in DECIDED]
    assert [name for name in wanted if f"      {name}: ${{{name}:-}}\n" not in text] == []
    assert "TANDEM_SHUTDOWN_TIMEOUT" not in text and "stop_grace_period: 40s" in text


def test_the_cpu_lock_is_the_other_without_cuda() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    cpu = (ROOT / "requirements-cpu.lock").read_text(encoding="utf-8")
    assert cpu == cpu_lock(lock)
    names = [line.partition("==")[0] for line in cpu.splitlines() if line[:1].isalpha()]
    assert {"numpy", "pillow", "prometheus-client", "pydantic-settings", "sympy"} <= set(names)
    assert not [name for name in names if name.startswith(("torch", "nvidia", "cuda", "triton"))]
    assert all("--hash=sha256:" in entry for entry in cpu.split("\n\n"))


@pytest.mark.parametrize(("shape", "commands"), [
    (Shape("100mbit"), ["qdisc replace dev eth0 root handle 1: tbf rate 100mbit burst 256kb latency 400ms"]),
    (Shape("", "20ms", "1%"), ["qdisc replace dev eth0 root handle 1: netem delay 20ms loss 1%"]),
    (Shape("1gbit", "5ms"), [
        "qdisc replace dev eth0 root handle 1: netem delay 5ms",
        "qdisc replace dev eth0 parent 1: handle 2: tbf rate 1gbit burst 256kb latency 400ms",
    ]),
])  # fmt: skip
def test_what_tc_is_told(shape: Shape, commands: list[str]) -> None:
    shape.check()
    assert shape.commands() == commands


@pytest.mark.parametrize(("shape", "line"), [
    (Shape("100"), "RATE=100 is not valid; give for example RATE=100mbit"),
    (Shape("", "20"), "LATENCY=20 is not valid; give for example LATENCY=20ms"),
    (Shape("", "", "1;ls"), "LOSS=1;ls is not valid; give for example LOSS=1%"),
])  # fmt: skip
def test_what_tc_would_not_take(shape: Shape, line: str) -> None:
    with pytest.raises(ClusterError) as error:
        shape.check()
    assert str(error.value) == line


def test_the_forwarder_hands_on_and_survives_a_target_that_is_gone(free_port: int, processes: Any) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"x" * 300_000)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    target = f"127.0.0.1:{server.server_port}"
    process = processes.start([sys.executable, str(ROOT / "compose" / "forward.py"), str(free_port), target])

    def get() -> int:
        with urlopen(f"http://127.0.0.1:{free_port}/", timeout=2) as answer:
            return len(answer.read())

    def answers(wanted: bool) -> bool:
        for _ in range(100):
            try:
                if (get() == 300_000) is wanted:
                    return True
            except OSError:
                if not wanted:
                    return True
            threading.Event().wait(0.1)
        return False

    assert answers(True)
    server.shutdown()
    server.server_close()
    assert answers(False)
    assert process.poll() is None
    process.terminate()
    assert processes.wait(process, 10)[0] == 0


def test_help_lists_every_target_that_has_a_text() -> None:
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30
    ).stdout
    for target in "setup image image-size sbom docker-host compose-up compose-scale chaos".split():
        assert f"  make {target} " in said


def test_a_build_of_torch_that_there_is_not() -> None:
    ended = subprocess.run(
        ["make", "--no-print-directory", "image", "TORCH=tpu"],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    line = "make: TORCH=tpu is not a build of torch; valid are cuda and cpu: make image TORCH=cuda\n"
    assert ended.returncode == 2 and ended.stderr.startswith(line)


def test_only_root_prepares_a_host() -> None:
    command = [sys.executable, str(ROOT / "docker" / "host.py")]
    if os.geteuid() == 0:
        command = ["setpriv", "--reuid", "10001", "--clear-groups", "python3", "-"]
    ended = subprocess.run(
        command, input=(ROOT / "docker" / "host.py").read_text(), capture_output=True, text=True, timeout=30,
        cwd="/", env={"PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    line = "tandem: preparing this machine needs root; type: sudo make docker-host\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", line)
