"""What in-memory snapshots cost a step: 100 MB of state, two nodes of one rank on this machine, over gloo.

    python benchmarks/snapshot_cost.py [--rounds 5] [--steps 150] [--megabytes 100] [--json FILE]

The same task with `--snapshot-every auto`, with `1` (after every step) and with `never`. In a round all have
their turn, each round beginning with another one, and ratios are of runs of the same round. A run counts by
the mean of its steps, because most of them have no snapshot under `auto`. Its clock is the model's own, after
the first steps, in which memory is allocated. Processor time is that of rank 0's process; other work on the
machine changes it less than it changes the clock.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from table import Row, finish
from tandem.process import below, living, stat_of
from wide_model import Wide

HERE = Path(__file__).resolve()
NOTES = "SNAPSHOT_COST_NOTES"
WARM_UP = 20
LIMIT_SECONDS = 900
MOST = 0.03
KINDS = ("auto", "1", "never")
MEANING = {"auto": "--snapshot-every auto", "1": "a snapshot after every step"}


def _beside_ranks() -> float:
    """Return the processor seconds of this node's other processes: the agent, and what it has started."""
    everything = living()
    agent = everything[os.getpid()]
    while (parent := everything[agent.parent]).name.startswith("tandem"):
        agent = parent
    beside = [agent, *below(agent.pid, among=everything)]
    fields = [stat_of(each.pid) for each in beside if not each.name.startswith("tandem-rank")]
    return sum(int(each[11]) + int(each[12]) for each in fields if each) / os.sysconf("SC_CLK_TCK")


@dataclass
class Noted(Wide):
    """Weights and AdamW's two moments; rank 0 notes the mean of its steps in seconds, of three clocks.

    They are the wall clock, its own processor time, and that of the processes beside the ranks.
    """

    warmup: int = 20
    last: int = 0
    began = (0.0, 0.0, 0.0)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 1e-3)

    def after_step(self, model: nn.Module, step: int) -> None:
        if step not in (self.warmup, self.last) or torch.distributed.get_rank() > 0:
            return
        now = (time.perf_counter(), time.process_time(), _beside_ranks())
        if step == self.warmup:
            self.began = now
        else:
            pairs = zip(now, self.began, strict=True)
            means = [(ended - began) / (self.last - self.warmup) for ended, began in pairs]
            Path(os.environ[NOTES]).write_text(json.dumps(means))


@dataclass(frozen=True)
class Run:
    """Means of a step in seconds, as in `Noted`, and the interval in the metrics (None: not there)."""

    seconds: float
    processor: float
    beside: float
    interval: float | None


def trained(
    steps: int,
    megabytes: int,
    folder: Path,
    *flags: object,
    warmup: int = WARM_UP,
    variables: Mapping[str, str] | None = None,
) -> Run:
    """Train once, on two nodes unless `flags` say otherwise. Raises RuntimeError if that fails."""
    notes = folder / "notes.json"
    notes.unlink(missing_ok=True)
    width = round((megabytes * 1e6 / 12) ** 0.5)
    words: list[object] = ["--task", f"{HERE}:Noted", "--task.width", width]
    words += ["--task.warmup", warmup, "--task.last", warmup + steps, "--steps", warmup + steps]
    words += ["--batch-size", 48, "--nodes", 2, "--nproc", 1, "--device", "cpu", "--threads", 1]
    words += ["--checkpoint-every", "never", "--eval-every", "never", "--resume", "never"]
    words += ["--metrics", 0, "--metrics-linger", 0, "--progress", "off", "--run-dir", folder / "run", *flags]
    own = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    source = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "launch", *map(str, words)],
        env={**own, NOTES: str(notes), "PYTHONPATH": source, **(variables or {})},
        timeout=LIMIT_SECONDS,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{flags} ended with {done.returncode}: {done.stderr[-2000:]}")
    shown = re.search(
        r"^tandem_snapshot_interval_seconds (\S+)$", (folder / "run/metrics.prom").read_text(), re.M
    )
    return Run(*json.loads(notes.read_text()), float(shown[1]) if shown else None)


def measure(rounds: int, steps: int, megabytes: int) -> list[Row]:
    found: dict[str, list[Run]] = {every: [] for every in KINDS}
    for number in range(rounds):
        first = number % len(KINDS)
        for every in KINDS[first:] + KINDS[:first]:
            with tempfile.TemporaryDirectory(prefix="snapshot-cost-") as folder:
                run = trained(steps, megabytes, Path(folder), "--snapshot-every", every)
            found[every].append(run)
            print(f"round {number + 1}: {every}: {run}", file=sys.stderr, flush=True)
    intervals = sorted(run.interval or 0.0 for run in found["auto"])
    about = {"auto": f"a snapshot every {intervals[0]:.1f} to {intervals[-1]:.1f} s, "}
    rows = []
    for clock, of in (("step", "seconds"), ("processor time of a step", "processor")):
        for every in ("auto", "1"):
            mine = [getattr(run, of) for run in found[every]]
            never = [getattr(run, of) for run in found["never"]]
            cost = statistics.median(a / b for a, b in zip(mine, never, strict=True)) - 1
            has_target = every == "auto" and of == "seconds"
            rows.append(
                Row(
                    f"{clock}, {megabytes} MB of state, {MEANING[every]}",
                    rounds,
                    f"{about.get(every, '') if of == 'seconds' else ''}{spread(mine)}",
                    f"--snapshot-every never {spread(never)}",
                    f"{cost:+.1%}",
                    f"at most +{MOST:.0%}" if has_target else "",
                    cost <= MOST if has_target else None,
                    rounds,
                    statistics.median(mine),
                    statistics.median(never),
                )
            )
    return rows


def spread(seconds: list[float]) -> str:
    lowest, highest = min(seconds) * 1000, max(seconds) * 1000
    return f"{statistics.median(seconds) * 1000:.1f} ms ({lowest:.1f} to {highest:.1f})"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150, help="that are measured in each run")
    parser.add_argument("--megabytes", type=int, default=100, help="of state on each node")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(measure(asked.rounds, asked.steps, asked.megabytes), asked.json)


if __name__ == "__main__":
    sys.exit(main())
