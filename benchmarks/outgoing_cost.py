"""What a step pays for progress in the TrainJob and for OpenTelemetry: two ranks on this machine, over gloo.

    python benchmarks/outgoing_cost.py [--rounds 9] [--steps 600] [--json FILE]

The same task alone, with Kubeflow Trainer's status endpoint, whose server fails half of the time, and with an
OpenTelemetry collector. In a round all have their turn, each round beginning with another one, and ratios are
of runs of the same round. A run counts by the mean of its steps after the first ones, in which the process
that sends to the collector starts. The servers run in this process, on the same cores.

The clock of a step varies by several percent. What the ranks lose is at most what the other processes of the
node use more, in processor time, on the cores that they share. That share is the second figure.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from snapshot_cost import Run, spread, trained
from table import Row, finish

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from receivers import Authority, Receiver
from trials.collector import Collector

MEGABYTES = 4
WARM_UP = 800
FAULTS = (429, 500, 503)
MOST = {"status": 1.005, "otel": 1.01}
KINDS = {
    "alone": "",
    "status": "progress for Kubeflow Trainer, and a server that fails half of the time",
    "otel": "metrics, spans and logs for an OpenTelemetry collector",
}


@contextmanager
def servers(folder: Path) -> Iterator[dict[str, dict[str, str]]]:
    """Yield the variables of each kind."""
    authority = Authority(folder / "authority")
    chance = random.Random(1)
    status = Receiver(authority.tls, lambda number: 200 if chance.random() < 0.5 else chance.choice(FAULTS))
    collector = Collector()
    token = folder / "token"
    token.write_text("a-token")
    yield {
        "alone": {},
        "status": {
            "KUBEFLOW_TRAINER_SERVER_URL": f"{status.url}/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(authority.ca),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
        },
        "otel": {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url},
    }
    status.close()
    if not status.posted or not collector.spans():
        raise RuntimeError("a server was sent nothing")


def measure(rounds: int, steps: int) -> list[Row]:
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="outgoing-cost-") as outer, servers(Path(outer)) as variables:
        for number in range(rounds):
            first = number % len(KINDS)
            for kind in [*KINDS][first:] + [*KINDS][:first]:
                with tempfile.TemporaryDirectory(prefix="outgoing-cost-") as folder:
                    flags = ("--nodes", 1, "--nproc", 2, "--snapshot-every", "never")
                    run = trained(
                        steps, MEGABYTES, Path(folder), *flags, warmup=WARM_UP, variables=variables[kind]
                    )
                found[kind].append(run)
                print(f"round {number + 1}: {kind}: {run}", file=sys.stderr, flush=True)
    return [row for kind in MOST for row in rows_of(kind, found[kind], found["alone"])]


def rows_of(kind: str, runs: list[Run], alone: list[Run]) -> Iterator[Row]:
    """Yield the ratio of the steps, and the share of the cores that the other processes use more."""
    cores = len(os.sched_getaffinity(0))
    pairs = list(zip(runs, alone, strict=True))
    steps = statistics.median(mine.seconds / other.seconds for mine, other in pairs)
    mine, others = [run.seconds for run in runs], [run.seconds for run in alone]
    yield Row(
        f"step: {KINDS[kind]}",
        len(runs),
        spread(mine),
        f"neither {spread(others)}",
        f"{steps:.3f}",
        passed=None,
        control_trials=len(alone),
        seconds=statistics.median(mine),
        control_seconds=statistics.median(others),
    )
    more = statistics.median((mine.beside - other.beside) / (cores * mine.seconds) for mine, other in pairs)
    used = statistics.median(run.beside / (cores * run.seconds) for run in runs)
    used_alone = statistics.median(run.beside / (cores * run.seconds) for run in alone)
    yield Row(
        f"share of {cores} cores for the processes beside the ranks: {KINDS[kind]}",
        len(runs),
        f"{used:.2%}",
        f"neither {used_alone:.2%}",
        f"{1 + more:.4f}",
        f"at most {MOST[kind]:g} of a step",
        1 + more <= MOST[kind],
        len(alone),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=1500, help="that are measured in each run")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(measure(asked.rounds, asked.steps), asked.json)


if __name__ == "__main__":
    sys.exit(main())
