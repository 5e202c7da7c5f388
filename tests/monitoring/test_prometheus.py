"""A real Prometheus scrapes a two-node run of about 12 s every 5 s: families, queries, the last step.

On the way a rank is killed, so that what counts restarts, loads and replays has something to count.
"""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from patience import patient
from prometheus import DASHBOARD, RULES, TASK, Prometheus, fetch, pid_of_rank, until
from tandem.report.server import MetricsServer
from tandem.telemetry import metrics
from tandem.telemetry.meter import ACTIVITIES, PHASES
from tandem.telemetry.metrics import FAMILIES, wire_names
from tandem.telemetry.registry import Registry

pytestmark = [pytest.mark.core, pytest.mark.monitoring, pytest.mark.timeout(300)]
STEPS = 400
NO_SAMPLE_HERE = {
    "tandem_loss_scale": "fp16 only",
    "tandem_data_errors": "from the first sample that cannot be read",
    "tandem_spare_nodes": "with --spares only",
    "tandem_neighbor_copy_step": "with fsdp on several nodes",
    "tandem_tokens": "where a task gives a sum named tokens",
    "tandem_tokens_per_second": "where a task gives a sum named tokens",
    "tandem_block_requests": "where blocks are read from an object store",
    "tandem_block_bytes": "where blocks are read from an object store",
    "tandem_block_needed_bytes": "where blocks are read from an object store",
    "tandem_block_cache_hits": "where blocks are read from an object store",
    "tandem_block_wait_seconds": "where blocks are read from an object store",
    "tandem_blocks_ahead": "where blocks are read from an object store",
    "tandem_block_cache_bytes": "where blocks are read from an object store",
    "tandem_block_cache_limit_bytes": "where blocks are read from an object store",
    "tandem_outgoing_requests": "with --notify, or where Kubeflow Trainer asks for progress",
    "tandem_collect_errors": "from the first metric sample that could not be used",
}
NO_DATA_HERE = {
    "Loss scale": "fp16 only",
    "instance:tandem_gpu_power_watts:rate5m": "needs a GPU",
}
OTHER_ROWS = ("GPU", "Data on object stores")  # all of their panels need a GPU, or blocks


class Scraped:
    """The run, over; and what Prometheus and the run directory have of it."""

    def __init__(self, prometheus: Prometheus, run_dir: Path, page: bytes, output: str) -> None:
        self.prometheus, self.run_dir, self.page, self.output = prometheus, run_dir, page, output
        # Graphs show nothing of a target that has gone: they are asked for the time of its last scrape.
        stamps = prometheus.query("max_over_time(timestamp(tandem_global_step)[10m:1s])")
        self.last_scrape = float(stamps[0]["value"][1])

    def samples(self) -> dict[str, float]:
        """The last page of metrics: series as text -> value."""
        lines = (self.run_dir / "metrics.prom").read_text().splitlines()
        return {
            line.rpartition(" ")[0]: float(line.rpartition(" ")[2])
            for line in lines
            if not line.startswith("#")
        }


@pytest.fixture(scope="module")
def scraped(
    tmp_path_factory: pytest.TempPathFactory, module_processes: Any, module_ports: list[int], require: Any
) -> Scraped:
    require("prometheus")
    folder = tmp_path_factory.mktemp("scraped")
    (folder / "slow.py").write_text(TASK)
    port = module_ports[0]
    rules = RULES.read_text()
    target = f"127.0.0.1:{port}"
    prometheus = Prometheus(module_processes, folder / "prometheus", module_ports[1], target, "5s", rules)
    flags: dict[str, object] = {
        "nodes": 2, "task": "slow.py:Slow", "task.slow-rank": 1, "task.delay": 0.05, "run-dir": "run",
        "batch-size": 24, "steps": STEPS, "clip-norm": 0.5, "log-every": 20, "metrics": port,
        "metrics-linger": 30, "eval-every": 100, "checkpoint-every": 100,
    }  # fmt: skip
    command = [sys.executable, "-m", "tandem", "launch"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
    run = module_processes.start(command, cwd=folder, env=environment)
    page = until(lambda: _page_in_training(target), "page of a training run", 180)
    os.kill(until(lambda: pid_of_rank(1, run.pid), "rank 1"), signal.SIGKILL)
    code, output = module_processes.wait(run)
    assert code == 0, output
    return Scraped(prometheus, folder / "run", page, output)


def _page_in_training(target: str) -> bytes | None:
    page = fetch(f"http://{target}/metrics")
    return (
        page if b"tandem_rank_compute_seconds{" in page and b"tandem_checkpoint_size_bytes" in page else None
    )


def test_the_last_step_is_stored(scraped: Scraped) -> None:
    ask = scraped.prometheus.value
    assert ask("last_over_time(tandem_global_step[5m])") == STEPS
    again = ask("last_over_time(tandem_steps_replayed_total[5m])")
    assert ask("last_over_time(tandem_steps_total[5m])") == STEPS + (again or 0)
    assert ask('last_over_time(tandem_restarts_total{reason="crash"}[5m])') == 1
    assert ask("last_over_time(tandem_progress_ratio[5m])") == 1
    assert ask('last_over_time(tandem_run_state{tandem_run_state="succeeded"}[5m])') == 1


def test_every_family_has_a_sample(scraped: Scraped) -> None:
    stored = set(scraped.prometheus.ask("label/__name__/values"))
    missing = [
        family.name
        for family in FAMILIES
        if family.group != "GPU"
        and family.name not in NO_SAMPLE_HERE
        and not set(family.wire_names) <= stored
    ]
    assert not missing
    assert not [name for name in stored if name.startswith("tandem_gpu")]


def test_numbers_agree_with_each_other(scraped: Scraped) -> None:
    samples = scraped.samples()
    steps_total = samples["tandem_step_duration_seconds_sum"]
    phases = sum(samples[f'tandem_step_phase_seconds_total{{phase="{name}"}}'] for name in PHASES)
    assert phases == pytest.approx(steps_total, rel=0.02)
    # A killed rank 0 takes the times of its last steps with it; that they were done, the next world knows.
    timed = samples["tandem_step_duration_seconds_count"]
    assert 0.8 * samples["tandem_steps_total"] < timed <= samples["tandem_steps_total"]
    wall = (scraped.run_dir / "metrics.prom").stat().st_mtime - samples["tandem_run_start_timestamp_seconds"]
    activities = [samples[f'tandem_activity_seconds_total{{activity="{name}"}}'] for name in ACTIVITIES]
    assert sum(activities) == pytest.approx(wall, rel=0.02)
    waits = [
        samples[f'tandem_gradient_sync_seconds_total{{overlap="{name}"}}'] for name in ("exposed", "hidden")
    ]
    assert 0 < waits[0] < steps_total and 0 <= waits[1] < steps_total
    assert samples["tandem_samples_total"] == samples["tandem_steps_total"] * 24
    assert samples["tandem_model_flops_total"] > 0 and samples["tandem_peak_flops"] > 1e9
    assert samples["tandem_checkpoint_interval_steps"] == 100
    assert not [name for name in samples if name.startswith("tandem_collect_errors")]


def test_the_straggler_is_named(scraped: Scraped) -> None:
    samples = scraped.samples()
    assert samples["tandem_slowest_rank"] == 1
    named = scraped.prometheus.query("topk(1, last_over_time(tandem_rank_compute_seconds[5m]))")
    assert named[0]["metric"]["rank"] == "1" and named[0]["metric"]["node"] == "1"
    excess = scraped.prometheus.query("last_over_time(tandem_straggler_excess_seconds[5m])")
    assert {each["metric"]["phase"] for each in excess} == {"forward"}
    assert "straggler: rank 1 on node 1" in scraped.output


def test_promtool_finds_no_fault_with_the_page(scraped: Scraped, require: Any) -> None:
    require("promtool")
    for page in (scraped.page, (scraped.run_dir / "metrics.prom").read_bytes()):
        done = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, timeout=patient(30)
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_every_rule_is_evaluated(scraped: Scraped) -> None:
    for group in scraped.prometheus.ask("rules")["groups"]:
        assert [
            (rule["name"], rule.get("lastError")) for rule in group["rules"] if rule["health"] != "ok"
        ] == []
    stored = set(scraped.prometheus.ask("label/__name__/values"))
    for rule in (rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]):
        names = set(re.findall(r"\b(?:instance\w*:)?tandem_[\w:]+", rule["expr"]))
        names -= {name for name in names if "gpu" in name} | {"tandem_run_state"}
        assert names <= stored, rule
        if "record" in rule and rule["record"] not in NO_DATA_HERE:
            assert scraped.prometheus.query(f"last_over_time({rule['record']}[5m])"), rule


def panels() -> list[tuple[str, str, str]]:
    """(row, title, query) of every query of the dashboard."""
    found, row = [], ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        row = panel["title"] if panel["type"] == "row" else row
        for inner in [panel, *panel.get("panels", [])]:
            found += [(row, inner["title"], target["expr"]) for target in inner.get("targets", [])]
    return found


def with_values(query: str) -> str:
    """A query of the dashboard with values for its variables."""
    values = {"$job": "tandem", "$instance": ".*", "$__rate_interval": "5m", "$__range": "30m"}
    for variable, value in values.items():
        query = query.replace(variable, value)
    return query


def test_every_query_of_the_dashboard_returns_data(scraped: Scraped) -> None:
    empty: list[tuple[str, str]] = []
    for row, title, query in panels():
        query = with_values(query)
        # Asked for the time of the run's end: graphs show nothing of a target that has gone since.
        found: Any = scraped.prometheus.ask("query", query=query, time=scraped.last_scrape)["result"]
        if not found and row not in OTHER_ROWS and title not in NO_DATA_HERE:
            empty.append((title, query))
    assert not empty


def test_the_row_of_object_stores_has_data_from_a_node_that_reads(
    tmp_path: Path, processes: Any, free_port: int, require: Any
) -> None:
    require("prometheus")
    registry = Registry()
    counters = [metrics.BLOCK_BYTES, metrics.BLOCK_NEEDED_BYTES, metrics.BLOCK_CACHE_HITS]
    gauges = [metrics.BLOCK_CACHE_BYTES, metrics.BLOCK_CACHE_LIMIT_BYTES]

    def read() -> None:
        registry.apply([
            *(counter.inc(1) for counter in counters), *(gauge.set(1) for gauge in gauges),
            metrics.BLOCK_WAIT_SECONDS.inc(1), metrics.BLOCKS_AHEAD.set(1, rank=0),
            metrics.BLOCK_REQUESTS.inc(1, outcome="ok"),
        ])  # fmt: skip

    registry.before_page = read
    server = MetricsServer(registry, "127.0.0.1", 0, dict)
    try:
        target = f"127.0.0.1:{server.port}"
        prometheus = Prometheus(processes, tmp_path / "prometheus", free_port, target, "1s", "groups: []")
        asked = [query for row, _, query in panels() if row == "Data on object stores"]
        assert len(asked) == 8
        for query in asked:
            query = with_values(query)
            until(lambda query=query: prometheus.query(query), query)
    finally:
        server.close()


def test_rules_and_dashboard_use_declared_names_only() -> None:
    rules = yaml.safe_load(RULES.read_text())["groups"]
    recorded = {rule["record"] for group in rules for rule in group["rules"] if "record" in rule}
    queries = [query for _, _, query in panels()] + [
        rule["expr"] for group in rules for rule in group["rules"]
    ]
    labels = {"tandem_run_state"}
    for query in queries:
        used = set(re.findall(r"[\w:]*tandem_[\w:]+", query))
        assert used - labels <= wire_names() | recorded, query
