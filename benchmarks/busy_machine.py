"""Measure the speed of the default task on a busy machine, relative to an idle one.

    python benchmarks/busy_machine.py [--rounds 5] [--json benchmarks/results/busy_machine.json]

The load is one process per core that counts. The task runs with one rank that has a thread per core, and with
two ranks of one thread. As a baseline, it also runs with threads that spin while they wait, which is OpenMP's
default. Each round runs every case without and with the load, so that other load affects all cases equally.
The result is the median over rounds.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from table import Row, finish

LEAST_SHARE = 0.4
LIMIT_SECONDS = 900
SPINNING = {"GOMP_SPINCOUNT": "300000"}  # what libgomp takes where nobody has said anything
PASSIVE: dict[str, str] = {}
STEPS = 300


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Run `count` processes that compute and never wait."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


def pace(ranks: int, waiting: dict[str, str]) -> float:
    """Return the samples per second of the default task; its evaluation comes after the measured steps."""
    foreign = ("TANDEM_", "OMP_", "GOMP_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    with tempfile.TemporaryDirectory(prefix="busy-") as folder:
        words = ["--nproc", ranks, "--steps", STEPS, "--eval-every", STEPS, "--run-dir", f"{folder}/run"]
        words += ["--metrics", 0, "--metrics-linger", 0, "--progress", "off"]
        command = [sys.executable, "-m", "tandem", "launch", *map(str, words)]
        subprocess.run(
            command, env=environment | waiting, check=True, capture_output=True, timeout=LIMIT_SECONDS
        )
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return float(summary["samples_per_second"])


def measure(rounds: int) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0))
    cases = [(ranks, waiting) for ranks in (1, 2) for waiting in (PASSIVE, SPINNING)]
    found: dict[int, list[tuple[float, float]]] = {case: [] for case in range(len(cases))}
    for _ in range(rounds):
        for case, (ranks, waiting) in enumerate(cases):
            calm = pace(ranks, waiting)
            with hogs(cores):
                found[case].append((calm, pace(ranks, waiting)))
    for case in range(0, len(cases), 2):
        ranks = cases[case][0]
        calm, busy = (statistics.median(pair[which] for pair in found[case]) for which in (0, 1))
        spinning = statistics.median(pair[1] for pair in found[case + 1])
        yield Row(
            f"a CPU hog on each of {cores} cores, {'1 rank' if ranks == 1 else f'{ranks} ranks'}",
            rounds,
            f"{busy:,.0f} samples/s ({calm:,.0f} without hogs)",
            f"{spinning:,.0f} with spinning threads",
            f"{busy / calm:.2f}",
            f"at least {LEAST_SHARE} of the speed without hogs",
            busy / calm >= LEAST_SHARE,
            rounds,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = list(measure(options.rounds))
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
