"""Who is told, by a real Prometheus and Alertmanager: of a failed run, and not of a stop."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from prometheus import ROOT, RULES, TASK, Prometheus, fetch, until

pytestmark = [pytest.mark.monitoring, pytest.mark.timeout(400)]
FAILED, STOPPED = "failed", "stopped"


class Webhook(ThreadingHTTPServer):
    """What an on-call person would get: the alerts of each notification."""

    def __init__(self) -> None:
        self.alerts: list[dict[str, Any]] = []
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.alerts += json.loads(body)["alerts"]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def short_rules() -> str:
    """Seconds for minutes, but for the time that a failure is remembered: longer than a group waits."""
    spec = importlib.util.spec_from_file_location("shorten", ROOT / "monitoring" / "shorten.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kept = RULES.read_text().replace("[30m]", "[KEPT]").replace("[1d]", "[SEEN]")
    return str(module.shortened(kept)).replace("[KEPT]", "[30m]").replace("[SEEN]", "[1d]")


def start_alertmanager(processes: Any, folder: Path, port: int, webhook: Webhook) -> None:
    """With a group's wait of 5 s: longer than the final state of a run can be scraped."""
    folder.mkdir()
    url = f"http://127.0.0.1:{webhook.server_address[1]}/"
    config = {
        "route": {"receiver": "person", "group_by": ["..."], "group_wait": "5s", "group_interval": "5s"},
        "receivers": [{"name": "person", "webhook_configs": [{"url": url}]}],
    }
    (folder / "alertmanager.yml").write_text(json.dumps(config))  # JSON is YAML
    command = [
        "prometheus-alertmanager",
        f"--config.file={folder}/alertmanager.yml",
        f"--storage.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
        "--cluster.listen-address=",
    ]
    processes.start(command, stdout=(folder / "log").open("w"), stderr=subprocess.STDOUT)
    until(lambda: fetch(f"http://127.0.0.1:{port}/-/ready"), "Alertmanager")


def test_a_failed_run_notifies_and_a_stop_does_not(
    tmp_path: Path, processes: Any, module_ports: list[int], webhook: Webhook, require: Any
) -> None:
    """Both are scraped while they train, end within one scrape, and their targets go."""
    require("prometheus")
    require("alertmanager", "prometheus-alertmanager")
    (tmp_path / "slow.py").write_text(TASK)
    ports = dict(zip((FAILED, STOPPED), module_ports, strict=False))
    start_alertmanager(processes, tmp_path / "alertmanager", module_ports[2], webhook)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    runs = {}
    for name, port in ports.items():
        (tmp_path / f"knobs-{name}").mkdir()
        flags: dict[str, object] = {
            "task": "slow.py:Slow", "task.knobs": tmp_path / f"knobs-{name}", "run-dir": name,
            "batch-size": 24, "steps": 100000, "log-every": 10, "eval-every": "never",
            "checkpoint-every": 50, "metrics": port, "device": "cpu",
        }  # fmt: skip
        command = [sys.executable, "-m", "tandem", "launch"]
        command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        runs[name] = processes.start(command, cwd=tmp_path, env=environment)
    for port in ports.values():  # a target that is not there yet is down
        until(lambda port=port: fetch(f"http://127.0.0.1:{port}/metrics"), "metrics", 120)
    targets = ",".join(f"127.0.0.1:{port}" for port in ports.values())
    watcher = Prometheus(
        processes, tmp_path / "prometheus", module_ports[3], targets, "2s", short_rules(), module_ports[2]
    )
    for name, port in ports.items():
        trains = f'tandem_run_state{{instance="127.0.0.1:{port}",tandem_run_state="training"}}'
        until(lambda trains=trains: watcher.value(trains) == 1, f"{name} training", 120)
    (tmp_path / f"knobs-{FAILED}" / "nan").touch()
    os.kill(runs[STOPPED].pid, signal.SIGTERM)
    codes = {name: processes.wait(run, 60)[0] for name, run in runs.items()}
    assert codes == {FAILED: 1, STOPPED: 143}

    def told(alert: str) -> list[dict[str, Any]]:
        return [each for each in webhook.alerts if each["labels"]["alertname"] == alert]

    until(lambda: told("TandemRunFailed"), "notification", 60)
    # Both targets are down for longer than that alert waits and a group takes.
    down = 'min_over_time(up{job="tandem"}[12s]) + max_over_time(up{job="tandem"}[12s]) == 0'
    until(lambda: len(watcher.query(down)) == 2, "both targets down", 60)
    failed = told("TandemRunFailed")
    assert {(each["labels"]["run"], each["labels"]["instance"]) for each in failed} == {
        (FAILED, f"127.0.0.1:{ports[FAILED]}")
    }
    assert f"Run {FAILED} on" in failed[0]["annotations"]["description"]
    assert not told("TandemTargetDown") + told("TandemRunVanished"), webhook.alerts
