"""What `--replay-check` costs: three ranks on this machine, over gloo.

    python benchmarks/replay_cost.py [--rounds 5] [--steps 400] [--json FILE]

One check is too short to be seen in a long run. So the same task trains without checks, and with a check in
every tenth step. In a round, each has its turn. The difference of the mean steps, times ten, is the cost of a
check. `auto` checks every 30 s, or less often if a check takes more than 0.3 s. That determines its share.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from snapshot_cost import Run, spread, trained
from table import Row, finish
from tandem.training.rank_checks import COST, SHORTEST_SECONDS

EVERY = 10
MEGABYTES = 20
FLAGS = ("--nodes", 1, "--nproc", 3, "--snapshot-every", "never")
KINDS = {"never": FLAGS, "every": (*FLAGS, "--replay-check", EVERY)}


def measure(rounds: int, steps: int) -> list[Row]:
    """Return the cost of a check, and its share of the time under `auto`."""
    found: dict[str, list[Run]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in sorted(KINDS, reverse=bool(number % 2)):
            with tempfile.TemporaryDirectory(prefix="replay-cost-") as folder:
                run = trained(steps, MEGABYTES, Path(folder), *KINDS[kind])
            found[kind].append(run)
            print(f"round {number + 1}: {kind}: {run}", file=sys.stderr, flush=True)
    never = [run.seconds for run in found["never"]]
    every = [run.seconds for run in found["every"]]
    check = EVERY * statistics.median(a - b for a, b in zip(every, never, strict=True))
    share = check / max(SHORTEST_SECONDS, check / COST)
    return [
        Row(
            f"a check by `--replay-check`, {MEGABYTES} MB of state on 3 ranks",
            rounds,
            f"{check * 1000:.1f} ms",
            f"a step {spread(never)}",
            f"{check / statistics.median(never):.1f}",
            control_trials=rounds,
            passed=None,
            seconds=check,
            control_seconds=statistics.median(never),
        ),
        Row(
            "share of the time of these checks with `--replay-check auto`",
            rounds,
            f"{share:.2%}",
            target=f"at most {COST:.0%}",
            passed=share <= COST + 1e-9,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400, help="that are measured in each run")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(measure(asked.rounds, asked.steps), asked.json)


if __name__ == "__main__":
    sys.exit(main())
