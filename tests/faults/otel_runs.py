"""Runs that are sent to an OpenTelemetry collector, for the tests of their kills and of their ends."""

import json
import time
from pathlib import Path
from typing import Any

from small_runs import Runs

from trials.collector import Collector, Seen


class Sent:
    """A collector, and runs that it gets."""

    def __init__(self, runs: Runs) -> None:
        self.collector = Collector()
        self.runs = runs
        runs.environment |= {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url,
            "OTEL_METRIC_EXPORT_INTERVAL": "300",
        }

    def start(self, *flags: object, run: str = "run") -> Any:
        every = ["--log-every", 1, "--checkpoint-every", 25, *flags]
        return self.runs.start("launch", run, *every, delay=0.02)

    def sender(self, run: str = "run") -> int:
        """The process that sends the run, or 0."""
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            words = words_of(int(path.parent.name))
            if "--follow" in words and str(self.runs.folder / run) in words:
                return int(path.parent.name)
        return 0

    def wait_for_sender(self, besides: int = 0, run: str = "run") -> int:
        found = 0

        def is_there() -> bool:
            nonlocal found
            found = self.sender(run)
            return found not in (0, besides)

        self.runs.until(is_there, "process that sends")
        return found

    def last_step(self, run: str = "run") -> int:
        """The last one that the journal has."""
        path = self.runs.folder / run / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def until_step(self, step: int) -> None:
        self.collector.until(lambda: self.collector.last("tandem_global_step") >= step, f"step {step}")

    def check_tree(self) -> None:
        """Parents are there, and are of the right kind."""
        spans = {(each.trace, each.span): each for each in self.collector.spans()}
        above = {"run": None, "generation": "run"}
        for each in spans.values():
            parent = spans.get((each.trace, each.parent))
            assert (parent.name if parent else None) == above.get(each.name, "generation"), each
            assert each.ended >= each.began > time.time() - 1000

    def check_counters(self, launches: int = 1) -> None:
        """Nothing is counted twice: a value never falls while the start time is the same."""
        points = self.collector.points("tandem_steps")
        assert len({each.began for each in points}) == launches
        for began in {each.began for each in points}:
            values = [each.value for each in points if each.began == began]
            assert values == sorted(values)
        assert all(each.is_cumulative_sum for each in points)


def words_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def only(found: list[Seen]) -> Seen:
    (one,) = found
    return one
