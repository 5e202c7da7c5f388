"""Plant faults in a run of many launches, and compare the time ledger with what each of them cost.

    python benchmarks/ledger_trials.py [--launches 20] [--json benchmarks/results/ledger.json]

In every other launch, a rank is killed, a rank is frozen until it counts as hung, and the launch is stopped.
The other launches are killed with all their processes. A pause follows each launch. There are no snapshots in
memory, so the steps since the last checkpoint are repeated. A clock outside the run measures the cost of a
fault: from the fault until the run has finished a step that it had not finished before. After an own stop, it
measures from the end of the launch. `tandem runs --goodput` must report the same.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from live_runs import LiveRun
from small_task import Small
from table import Row, finish

HANG_SECONDS = 4
PAUSE_SECONDS = (1.0, 6.0)
TRAIN_SECONDS = (3.0, 6.0)
LEAST_COST_SHARE = 0.9
FLAGS = ("--steps", 1_000_000, "--threads", 1, "--log-every", 1, "--task.delay", 0.02)
FLAGS = (*FLAGS, "--checkpoint-every", 100, "--hang-timeout", HANG_SECONDS, "--max-restarts", 100)
FLAGS = (*FLAGS, "--snapshot-every", "never", "--task", f"{Path(__file__).resolve()}:Counted")
STEP_FILE = "LEDGER_TRIALS_STEP"
LIMIT_SECONDS = 120.0


class Counted(Small):
    """Writes the number of finished steps at once: the run's own files are written a little later."""

    def after_step(self, model: nn.Module, step: int) -> None:
        if torch.distributed.get_rank() == 0:
            path = Path(os.environ[STEP_FILE])
            new = path.with_suffix(".new")
            new.write_text(str(step))
            new.rename(path)


class PlantedRun:
    """A run, and the seconds that its faults cost by this process's clock, by the ledger's causes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._steps = folder.with_name("steps")
        self._newest = 0
        self.costs = defaultdict[str, list[float]](list)
        self.began = time.time()
        self.ended = self.began
        self._cause = ""

    def launch(self, is_stopped: bool) -> None:
        """Launch, plant faults, and end the launch by a stop or a kill; then pause."""
        before = self._newest_step()
        variables = {STEP_FILE: str(self._steps)}
        with LiveRun(("tandem", "launch", "--nproc", "2"), self.folder, *FLAGS, variables=variables) as run:
            self._wait(run, before)
            if self._cause:
                self.costs[self._cause].append(time.time() - self.ended)
            self._train()
            if is_stopped:
                self._restart("rank killed", run, signal.SIGKILL)
                self._restart("hang", run, signal.SIGSTOP)
                run.process.send_signal(signal.SIGTERM)
                run.wait(LIMIT_SECONDS)
                self.ended = time.time()
            else:
                self.ended = time.time()
                os.killpg(run.process.pid, signal.SIGKILL)
                run.process.wait()
        self._cause = "stop" if is_stopped else "launch killed"
        time.sleep(random.uniform(*PAUSE_SECONDS))

    def reported(self) -> dict[str, Any]:
        """Return the run's row of `tandem runs --goodput --json`."""
        words = [sys.executable, "-m", "tandem", "runs", "--goodput", "--json", str(self.folder)]
        (found,) = json.loads(subprocess.check_output(words, text=True, timeout=LIMIT_SECONDS))["runs"]
        return dict(found)

    def _restart(self, cause: str, run: LiveRun, number: signal.Signals) -> None:
        before = self._newest_step()
        worlds = len(run.events("training"))
        at = time.time()
        os.kill(run.ranks()[1], number)
        run.until(lambda: len(run.events("training")) > worlds, "restart", LIMIT_SECONDS)
        self._wait(run, before)
        self.costs[cause].append(time.time() - at)
        self._train()

    def _wait(self, run: LiveRun, step: int) -> None:
        run.until(lambda: self._newest_step() > step, f"step after {step}", LIMIT_SECONDS)

    def _train(self) -> None:
        time.sleep(random.uniform(*TRAIN_SECONDS))

    def _newest_step(self) -> int:
        if self._steps.exists():
            self._newest = max(self._newest, int(self._steps.read_text()))
        return self._newest


def rows(launches: int, print_line: Callable[[str], None]) -> Iterator[Row]:
    """Run all launches, and yield a row for each cause, and one for the sum."""
    with tempfile.TemporaryDirectory(prefix="tandem-ledger-") as folder:
        run = PlantedRun(Path(folder) / "run")
        for number in range(launches):
            run.launch(is_stopped=(launches - number) % 2 == 1)  # the last one is stopped, not killed
            print_line(f"launch {number + 1} of {launches}")
        reported = run.reported()
    for cause, planted in run.costs.items():
        told = reported["causes"].get(cause, {"times": 0, "seconds": 0.0})
        ratio = told["seconds"] / sum(planted)
        yield Row(
            f"cost of: {cause}",
            len(planted),
            f"{told['seconds']:.1f} s for {told['times']}",
            f"by a clock outside the run: {sum(planted):.1f} s",
            f"{ratio:.2f}",
            "within 10% of the clock outside",
            LEAST_COST_SHARE <= ratio <= 2 - LEAST_COST_SHARE and told["times"] == len(planted),
        )
    wall = run.ended - run.began
    ratio = reported["wall_seconds"] / wall
    total = sum(reported["seconds"].values())
    yield Row(
        f"wall time of {launches} launches",
        launches,
        f"{reported['wall_seconds']:.1f} s; the parts add up to {total:.1f} s",
        f"by a clock outside the run: {wall:.1f} s",
        f"{ratio:.3f}",
        "within 0.5% of the clock outside",
        abs(ratio - 1) <= 0.005 and abs(total / wall - 1) <= 0.005,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launches", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(list(rows(asked.launches, lambda line: print(line, file=sys.stderr))), asked.json)


if __name__ == "__main__":
    sys.exit(main())
