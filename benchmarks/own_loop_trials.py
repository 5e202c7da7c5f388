"""Kill and resume custom loops: each example runs under `tandem launch`, with 1 and with 2 ranks.

    python benchmarks/own_loop_trials.py [--kills 10] [--worlds 1,2] [--only gan ...] [--json FILE]

This is `tandem verify-resume --script examples/NAME.py` with more kills per run. A run of 40 steps is killed
(SIGKILL) KILLS_PER_RUN times at random steps: first all processes, then one rank at a time, which the agent
restarts. At the end, the run is compared with an uninterrupted one: weights, kept state, and every line of
the log. If they differ, all kills of the run count as failed.
"""

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from resume_trials import KILLS_PER_RUN, killed_run, say
from table import Row, render, write
from tandem.script.job import Program
from tandem.signals import StopFlag
from tandem.verify.resume import STEPS, Runner

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
NAMES = ("gan", "ema_frozen", "stream_lm", "distillation", "own_collective")


def rows(worlds: Sequence[int] = (1, 2), kills: int = 10, names: Sequence[str] = NAMES) -> list[Row]:
    """Return a row for each example and number of ranks. Log every killed run on stderr."""
    return [_row(name, world_size, kills) for name in names for world_size in worlds]


def _row(name: str, world_size: int, kills: int) -> Row:
    chance, equal, done = random.Random(), 0, 0
    script = Program("script", str(EXAMPLES / f"{name}.py"))
    with tempfile.TemporaryDirectory(prefix="tandem-own-loop-") as folder:
        arguments = ["--nproc", str(world_size), "--threads", "1"]
        runner = Runner(arguments, os.environ, Path(folder), STEPS, StopFlag(), script)
        calm = runner.uninterrupted()
        while done < kills:
            run = killed_run(runner, calm, min(KILLS_PER_RUN, kills - done), chance)
            done += len(run.kills)
            equal += len(run.kills) if run.difference is None else 0
            say(f"{name}, {world_size} ranks: {run}")
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    outcome = f"{equal} of {done} equal"
    return Row(f"examples/{name}.py, {ranks}", done, outcome, target="all", passed=equal == done)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10, help="for each example and number of ranks [10]")
    parser.add_argument("--worlds", default="1,2", help="numbers of ranks [1,2]")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    table = rows([int(size) for size in asked.worlds.split(",")], asked.kills, asked.only)
    print(render(table))
    if asked.json:
        write(table, asked.json)
    return int(not all(row.passed for row in table))


if __name__ == "__main__":
    sys.exit(main())
