#!/usr/bin/env python3
"""Measure what a slower network costs: `python3 benchmarks/network_rate.py [--image tandem:cuda]`.

A wide model trains on two containers, without a limit and at lower rates. Exposed communication is the time
of the backward pass minus that of a single node, which exchanges nothing: DDP hides as much communication as
possible behind the backward pass, and waits for the rest. Prints one table and writes
results/network_rate.json.
"""

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from table import refuse_changes, save  # noqa: E402
from tandem.cluster.actions import remove_metrics, start  # noqa: E402
from tandem.cluster.engine import Cluster, ClusterError, check_engine  # noqa: E402
from tandem.cluster.job import ClusterJob  # noqa: E402

STEPS, LOG_EVERY = 40, 10
RATES = ("", "1gbit", "100mbit")
PROJECT = "tandem-benchmark"


@dataclass(frozen=True)
class Row:
    """One run. Times are means per step in milliseconds, without the first interval."""

    nodes: int
    rate: str
    backward_ms: float
    exposed_ms: float


def measure(image: str, nodes: int, rate: str) -> float:
    """Return the milliseconds of the backward pass per step. Raises ClusterError if the run fails."""
    cluster = Cluster(
        PROJECT,
        {
            "IMAGE": image,
            "NODES": str(nodes),
            "RUN": f"{nodes}-{rate or 'open'}",
            "METRICS_PORT": "",
            "RATE": rate,
            "TASKS": str(HERE),
            "TANDEM_TASK": "/tasks/wide_model.py:Wide",
            "COMMAND": f"launch --steps {STEPS} --log-every {LOG_EVERY} --batch-size 24 --threads 1 "
            "--snapshot-every never --metrics-linger 0",
        },
    )
    start(cluster)
    job = ClusterJob.of(cluster)
    job.wait()
    remove_metrics(cluster)
    codes = list(job.codes().values())
    if any(codes):
        raise ClusterError(f"the run with {nodes} nodes at {rate or 'no limit'} ended with {codes}")
    lines = (cluster.read(f"{cluster.run_dir}/metrics.jsonl") or "").splitlines()
    intervals = [float(json.loads(line)["phases"]["backward"]) for line in lines if '"phases"' in line]
    return 1000 * statistics.mean(intervals[1:]) / LOG_EVERY


def main() -> int:
    """Measure all rates, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--image", default="tandem:cuda")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "network_rate.json")
    options = parser.parse_args()
    refuse_changes(options.output)
    rows: list[Row] = []
    try:
        check_engine()
        alone = measure(options.image, 1, "")
        rows.append(Row(1, "-", round(alone, 1), 0.0))
        for rate in RATES:
            backward = measure(options.image, 2, rate)
            rows.append(Row(2, rate or "no limit", round(backward, 1), round(backward - alone, 1)))
    except ClusterError as error:
        print(f"benchmark: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        Cluster(PROJECT, {}).compose("down", "--volumes", "--remove-orphans")
    print("| nodes | rate | backward, ms a step | exposed communication, ms a step |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.nodes} | {row.rate} | {row.backward_ms} | {row.exposed_ms} |")
    save({"steps": STEPS, "rows": [asdict(row) for row in rows]}, options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
