#!/usr/bin/env python3
"""Write k8s/components/monitoring/dashboard.json, the Grafana dashboard. Run `make dashboard-json` after a change here.

Every panel is one line below. Panels of a row share its width. Summary panels query the whole time range, so that
they still show a run that has ended.
"""

import json
from pathlib import Path

WIDTH = 24
TARGET = 'job=~"$job",instance=~"$instance"'
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def series(name: str, labels: str = "") -> str:
    return f"{name}{{{TARGET}{',' + labels if labels else ''}}}"


def last(name: str, labels: str = "") -> str:
    """Return a query for the last value in the time range, even if the run has ended."""
    return f"last_over_time({series(name, labels)}[$__range])"


def rate(name: str, labels: str = "") -> str:
    return f"rate({series(name, labels)}[$__rate_interval])"


def quantile(part: float, name: str) -> str:
    return f"histogram_quantile({part}, sum by (instance, le) ({rate(name + '_bucket')}))"


def stat(title: str, unit: str, expr: str, legend: str = "", **more: object) -> dict[str, object]:
    """Return a summary panel: one large number or, with a legend and no unit, one word."""
    options = {
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "textMode": "name" if unit == "none" and legend else "value",
        "colorMode": "none",
        "graphMode": "none",
    }
    return panel("stat", title, unit, [(expr, legend)], options=options, instant=True, **more)


def graph(title: str, unit: str, *queries: tuple[str, str], stacked: bool = False, **more: object) -> dict[str, object]:
    custom: dict[str, object] = {"lineWidth": 1, "fillOpacity": 60 if stacked else 5, "showPoints": "auto"}
    custom["stacking"] = {"mode": "normal" if stacked else "none"}
    options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return panel("timeseries", title, unit, list(queries), options=options, custom=custom, **more)


def panel(
    kind: str,
    title: str,
    unit: str,
    queries: list[tuple[str, str]],
    *,
    options: dict[str, object],
    custom: dict[str, object] | None = None,
    instant: bool = False,
    limit: float | None = None,
    about: str = "",
) -> dict[str, object]:
    steps: list[dict[str, object]] = [{"color": "green", "value": None}]
    if limit is not None:
        steps.append({"color": "orange", "value": limit})
        custom = {**(custom or {}), "thresholdsStyle": {"mode": "line"}}
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": unit, "custom": custom or {}, "thresholds": {"mode": "absolute", "steps": steps}},
            "overrides": [],
        },
        "options": options,
        "targets": [
            {"refId": chr(65 + i), "datasource": DATASOURCE, "expr": expr, "legendFormat": legend,
             "instant": instant, "range": not instant}
            for i, (expr, legend) in enumerate(queries)
        ],
    }  # fmt: skip


STATE = f"max by (tandem_run_state) ({last('tandem_run_state')}) == 1"
AGE = f"time() - {last('tandem_checkpoint_last_success_timestamp_seconds')}"
PER_STEP = f"/ on (job, instance) group_left {rate('tandem_step_duration_seconds_count')}"

ROWS: dict[str, list[list[dict[str, object]]]] = {
    "Overview": [
        [
            stat("State", "none", STATE, "{{tandem_run_state}}"),
            stat("Step", "short", last("tandem_global_step")),
            stat("Progress", "percentunit", last("tandem_progress_ratio")),
            stat("Loss", "none", last("tandem_loss", 'split="train"')),
            stat("Throughput", "suffix: samples/s", last("instance:tandem_samples:rate5m")),
            stat("Expected end", "dateTimeFromNow", f"1000 * {last('tandem_estimated_completion_timestamp_seconds')}"),
            stat("Goodput", "percentunit", last("instance:tandem_goodput:ratio_rate1h"), about="share of wall time spent training"),
            stat("Restarts", "short", f"sum without (reason) ({last('tandem_restarts_total')})"),
        ],
        [
            graph("Loss", "none", (series("tandem_loss"), "{{split}} {{instance}}")),
            graph("Throughput", "suffix: samples/s", (rate("tandem_samples_total"), "{{instance}}")),
        ],
        [
            stat("Run", "none", last("tandem_run_info"), "{{run}}: {{task}}, {{precision}}, {{backend}} on {{platform}}"),
            stat("Build", "none", last("tandem_build_info"), "tandem {{version}}, torch {{torch}}, Python {{python}}"),
            stat("Ranks", "short", last("tandem_world_size")),
            stat("Nodes", "short", last("tandem_nodes")),
            stat("Run time", "s", f"time() - {last('tandem_run_start_timestamp_seconds')}"),
            stat("Time since last step", "s", f"time() - {last('tandem_last_step_timestamp_seconds')}"),
        ],
    ],
    "Time": [
        [
            graph("Step time", "s", (quantile(0.5, "tandem_step_duration_seconds"), "median"),
                  (quantile(0.95, "tandem_step_duration_seconds"), "95%"),
                  (f"{rate('tandem_step_duration_seconds_sum')} / {rate('tandem_step_duration_seconds_count')}", "mean")),
            graph("Step phases", "s", (f"{rate('tandem_step_phase_seconds_total')} {PER_STEP}", "{{phase}}"), stacked=True),
            graph("Gradient synchronization per step", "s",
                  (f"{rate('tandem_gradient_sync_seconds_total')} {PER_STEP}", "{{overlap}}"),
                  about="exposed: backward waits for it; hidden: overlaps with backward (estimated)"),
        ],
        [
            graph("Wall time by activity", "percentunit",
                  (f"{rate('tandem_activity_seconds_total')} / ignoring (activity) group_left "
                   f"sum without (activity) ({rate('tandem_activity_seconds_total')})", "{{activity}}"), stacked=True),
            graph("Model FLOP/s", "suffix: FLOP/s", (rate("tandem_model_flops_total"), "achieved"), (series("tandem_peak_flops"), "peak")),
            graph("MFU", "percentunit", (series("instance:tandem_mfu:ratio_rate5m"), "{{instance}}")),
            graph("Gradient traffic per rank", "Bps", (rate("tandem_gradient_sync_bytes_total"), "{{instance}}")),
        ],
        [
            graph("Wall time of all launches", "s", (series("tandem_run_seconds"), "{{part}}"), stacked=True,
                  about="where the time went since the first start of the run; steps count once"),
            graph("What each cause of a restart has cost", "s",
                  (series("tandem_restart_cost_seconds"), "{{cause}}"), stacked=True,
                  about="steps redone, time without a launch, and the start that follows"),
        ],
    ],
    "Stragglers": [
        [
            stat("Slowest rank", "none", f"topk(1, {last('tandem_rank_compute_seconds')})", "rank {{rank}} on node {{node}}"),
            stat("Straggler ratio", "none", last("instance:tandem_straggler:ratio"), limit=1.2, about="compute time of the slowest rank / median rank"),
            stat("Straggler", "none", f"{last('tandem_straggler_excess_seconds')} > 0", "rank {{rank}} on node {{node}}, in {{phase}}"),
        ],
        [
            graph("Compute time per step", "s", (series("tandem_rank_compute_seconds"), "rank {{rank}}"),
                  about="step time without the wait for gradients"),
            graph("Data wait time", "s", (series("tandem_rank_data_seconds"), "rank {{rank}}")),
            graph("Compute time across ranks", "s", (series("tandem_rank_compute_seconds_max"), "slowest"),
                  (series("tandem_rank_compute_seconds_median"), "median"), (series("tandem_rank_compute_seconds_min"), "fastest")),
            graph("Straggler ratio", "none", (series("instance:tandem_straggler:ratio"), "{{instance}}"), limit=1.2),
        ],
    ],
    "Optimization": [
        [
            graph("Scores", "none", (series("tandem_eval_score"), "{{score}}")),
            graph("Learning rate", "none", (series("tandem_learning_rate"), "group {{group}}")),
            graph("Gradient norm", "none", (series("tandem_grad_norm"), "before clipping")),
        ],
        [
            graph("Clipped steps", "percentunit", (f"{rate('tandem_grad_clips_total')} / {rate('tandem_steps_total')}", "{{instance}}")),
            graph("Skipped steps", "cps", (rate("tandem_steps_skipped_total"), "{{reason}}")),
            graph("Loss scale", "none", (series("tandem_loss_scale"), "{{instance}}")),
            graph("Replica mismatches", "short", (series("tandem_replica_mismatches_total"), "{{instance}}"), (series("tandem_replay_mismatches_total"), "{{instance}} replay")),
        ],
    ],
    "Checkpoints": [
        [
            stat("Checkpoint age", "s", AGE),
            stat("Last saved step", "short", last("tandem_checkpoint_last_success_step")),
            stat("Size", "bytes", last("tandem_checkpoint_size_bytes")),
            stat("Saves", "short", last("tandem_checkpoint_saves_total")),
            stat("Failed saves", "short", last("tandem_checkpoint_save_failures_total")),
            stat("Fallbacks", "short", last("tandem_checkpoint_fallbacks_total")),
        ],
        [
            graph("Steps at risk", "short", (f"{series('tandem_global_step')} - {series('tandem_checkpoint_last_success_step')}", "since the last checkpoint"),
                  (series("tandem_checkpoint_interval_steps"), "interval")),
            graph("Save duration", "s", (quantile(0.95, "tandem_checkpoint_save_duration_seconds"), "95%")),
            graph("Training blocked by saves", "percentunit", (rate("tandem_checkpoint_blocked_seconds_total"), "for checkpoints")),
            graph("Checkpoint volume", "bytes", (series("tandem_checkpoint_volume_available_bytes"), "free"), (series("tandem_checkpoint_volume_size_bytes"), "size")),
        ],
    ],
    "Lifecycle": [
        [
            graph("Restarts", "short", (series("tandem_restarts_total"), "{{reason}}")),
            graph("Replayed steps", "short", (series("tandem_steps_replayed_total"), "{{instance}}")),
            graph("Signals", "short", (series("tandem_signals_total"), "{{signal}}")),
            graph("Log messages", "cps", (rate("tandem_log_messages_total"), "{{level}}")),
        ],
    ],
    "Data on object stores": [
        [
            graph("Blocks received", "Bps", (rate("tandem_block_bytes_total"), "node {{node}}")),
            graph("Requests", "reqps", (f"sum by (instance, outcome) ({rate('tandem_block_requests_total')})", "{{outcome}}"),
                  about="retried: repeated after an error; damaged: another CRC-32 than in the index; failed: the end of the run"),
            graph("Readers that wait", "short", (rate("tandem_block_wait_seconds_total"), "node {{node}}"),
                  about="seconds per second, all ranks and loader processes of the node together"),
            graph("Bytes received per byte needed", "none", (f"{series('tandem_block_bytes_total')} / {series('tandem_block_needed_bytes_total')}", "node {{node}}"),
                  about="1 and the tar headers in the first epoch, less once blocks come from the cache; more if blocks are evicted before they are read"),
        ],
        [
            graph("Blocks ahead", "short", (series("tandem_blocks_ahead"), "rank {{rank}} on node {{node}}")),
            graph("Cache", "bytes", (series("tandem_block_cache_bytes"), "node {{node}}"), (series("tandem_block_cache_limit_bytes"), "node {{node}} limit")),
            graph("Blocks found in the cache", "short", (series("tandem_block_cache_hits_total"), "node {{node}}")),
        ],
    ],
    "GPU": [
        [
            graph("Utilization", "percentunit", (series("tandem_gpu_utilization_ratio"), "node {{node}} GPU {{gpu}}")),
            graph("Memory", "bytes", (series("tandem_gpu_memory_used_bytes"), "node {{node}} GPU {{gpu}} used"),
                  (series("tandem_torch_memory_allocated_bytes"), "node {{node}} GPU {{gpu}} in tensors")),
            graph("Power", "watt", (rate("tandem_gpu_energy_joules_total"), "node {{node}} GPU {{gpu}}")),
            graph("Temperature", "celsius", (series("tandem_gpu_temperature_celsius"), "node {{node}} GPU {{gpu}}")),
        ],
        [
            graph("Throttled", "bool", (series("tandem_gpu_throttled"), "node {{node}} GPU {{gpu}}")),
            graph("Allocator", "cps", (rate("tandem_torch_alloc_retries_total"), "retries"), (rate("tandem_torch_ooms_total"), "out of memory")),
            stat("Devices", "none", last("tandem_gpu_info"), "{{gpu}}: {{name}}, driver {{driver}}"),
        ],
    ],
}  # fmt: skip
COLLAPSED = ("Data on object stores", "GPU")
"""Rows that many runs have no data for."""


def variable(name: str, query: str, **more: object) -> dict[str, object]:
    return {
        "name": name, "type": "query", "datasource": DATASOURCE, "definition": query, "refresh": 2, "sort": 1,
        "query": {"query": query, "refId": name}, "includeAll": True, "multi": True,
        "current": {"text": "All", "value": "$__all"}, **more,
    }  # fmt: skip


VARIABLES: list[dict[str, object]] = [
    {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"},
    variable("job", "label_values(tandem_run_info, job)"),
    variable("run", 'label_values(tandem_run_info{job=~"$job"}, run)'),
    variable("instance", 'label_values(tandem_run_info{job=~"$job",run=~"$run"}, instance)'),
]


def dashboard() -> dict[str, object]:
    panels: list[dict[str, object]] = []
    y = 0
    for title, lines in ROWS.items():
        collapsed = title in COLLAPSED
        row: dict[str, object] = {"type": "row", "title": title, "collapsed": collapsed, "panels": [],
                                  "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}}  # fmt: skip
        panels.append(row)
        y += 1
        inside = row["panels"] if collapsed else panels
        for line in lines:
            height = 4 if all(each["type"] == "stat" for each in line) else 8
            width = WIDTH // len(line)
            for i, each in enumerate(line):
                each["gridPos"] = {"x": i * width, "y": y, "w": width, "h": height}
                assert isinstance(inside, list)
                inside.append(each)
            y += height
    for number, each in enumerate(every_panel(panels), 1):
        each["id"] = number
    return {
        "uid": "tandem", "title": "tandem", "tags": ["tandem", "training"], "schemaVersion": 39, "version": 1,
        "editable": True, "refresh": "5s", "time": {"from": "now-30m", "to": "now"}, "timezone": "browser",
        "templating": {"list": VARIABLES}, "annotations": {"list": [RESTARTS]}, "panels": panels,
        "graphTooltip": 1,
        "links": [{"title": "Runbook", "type": "link", "url": "https://github.com/ORG/tandem/blob/main/docs/monitoring.md",
                   "targetBlank": True, "icon": "doc"}],
    }  # fmt: skip


RESTARTS: dict[str, object] = {
    "name": "Restarts", "datasource": DATASOURCE, "enable": True, "iconColor": "orange", "titleFormat": "restart",
    "expr": f"sum without (reason) (changes({series('tandem_restarts_total')}[$__rate_interval])) > 0",
}  # fmt: skip


def every_panel(panels: list[dict[str, object]]) -> list[dict[str, object]]:
    """Return all panels, including those in collapsed rows."""
    found = []
    for each in panels:
        found.append(each)
        inner = each.get("panels", [])
        assert isinstance(inner, list)
        found += inner
    return found


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "k8s" / "components" / "monitoring" / "dashboard.json"
    path.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
