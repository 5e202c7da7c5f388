"""A real Prometheus with its own port and data, for one test module; and a task whose ranks can be slowed."""

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from patience import patient
from program_files import program_text
from tree import of_launch

ROOT = Path(__file__).parents[2]
RULES = ROOT / "monitoring" / "rules.yaml"
DASHBOARD = ROOT / "k8s" / "components" / "monitoring" / "dashboard.json"

TASK = program_text("prometheus_task")


def fetch(url: str, timeout: float = 10.0) -> bytes:
    with urllib.request.urlopen(url, timeout=patient(timeout)) as answer:
        return bytes(answer.read())


def until(condition: Callable[[], Any], what: str, limit: float = 60.0) -> Any:
    """The first true value of `condition()`; an answer that does not come counts as false."""
    deadline = time.monotonic() + patient(limit)
    while True:
        try:
            value = condition()
        except (OSError, ValueError):
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, f"no {what} within {limit:g} s"
        time.sleep(0.1)


def pid_of_rank(rank: int, launch: int) -> int:
    """The process of a rank of a launch that a test has started; 0 if there is none."""
    return next((pid for pid, name in of_launch(launch).items() if name == f"tandem-rank-{rank}"), 0)


class Prometheus:
    """Scrapes `target` as job "tandem" every `interval` (such as 5s), with the rules in `rules`.

    Several targets are given with commas between them; `alertmanager` is the port of one that is told.
    """

    def __init__(
        self,
        processes: Any,
        folder: Path,
        port: int,
        target: str,
        interval: str,
        rules: str,
        alertmanager: int | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rules.yaml").write_text(rules)
        config: dict[str, Any] = {
            "global": {"scrape_interval": interval, "evaluation_interval": "1s"},
            "rule_files": ["rules.yaml"],
            "scrape_configs": [{"job_name": "tandem", "static_configs": [{"targets": target.split(",")}]}],
        }
        if alertmanager is not None:
            told = [{"static_configs": [{"targets": [f"127.0.0.1:{alertmanager}"]}]}]
            config["alerting"] = {"alertmanagers": told}
        (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.url = f"http://127.0.0.1:{port}"
        self.process = processes.start(
            [
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=(folder / "log").open("w"),
        )
        until(lambda: fetch(f"{self.url}/-/ready"), "Prometheus")

    def ask(self, path: str, **parameters: object) -> Any:
        """The `data` of an API answer; an AssertionError says what Prometheus minds."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            answer = json.loads(fetch(url))
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        return list(self.ask("query", query=expression)["result"])

    def value(self, expression: str) -> float | None:
        """The value of the one series that the expression gives, None without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        return {
            alert["labels"]["alertname"]
            for alert in self.ask("alerts")["alerts"]
            if alert["state"] == "firing"
        }
