"""Kill a node of a job with a spare, which takes its place: seconds to the next step, lost steps, bits.

    python benchmarks/spare_trials.py [--trials 20] [--json FILE]

Two nodes train under ddp, and a third waits as a spare. The node that is not node 0 is killed with its agent
and ranks. It is started again, and becomes the spare of the next trial. One run takes all kills, and its
weights (SHA-256) are compared with those of an uninterrupted run. A step counts as lost if its line was in
the journal before the kill.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from live_runs import LiveRun
from node_trials import FLAGS, LIMIT_SECONDS, Loss, loss_of, outcome, undisturbed, weights
from table import Row, finish

MOST_SECONDS = 2.0
STEPS_PER_TRIAL = 250
"""A node that is started again waits after about 3 s. Meanwhile, the others need about 25 ms per step."""


class Job:
    """Two nodes and a spare, as a platform starts them."""

    def __init__(self, folder: Path, trials: int) -> None:
        self.folder = folder
        self.steps = ("--steps", STEPS_PER_TRIAL * trials + 100)
        address = f"127.0.0.101:{20_000 + random.randrange(20_000)}"
        self.flags = (*FLAGS, *self.steps, "--checkpoint-every", 1_000_000, "--max-restarts", 0)
        self.place = ("--nodes", 2, "--spares", 1, "--master", address)
        self.nodes = [self.start(number) for number in range(3)]

    def start(self, number: int) -> LiveRun:
        launcher = ("tandem", "launch", "--node-rank", str(number))
        own = {"TANDEM_STATE_DIR": str(self.folder / f"state-{number}")}
        return LiveRun(launcher, self.folder / "run", *self.flags, *self.place, variables=own)

    def state(self, number: int) -> str:
        """Return the state of a node as its health probe shows it; empty at its start."""
        with suppress(OSError, ValueError, KeyError):
            path = self.folder / f"state-{number}" / "health.json"
            return str(json.loads(path.read_text())["state"])
        return ""

    def replace(self) -> Loss:
        """Kill the node that trains with node 0 once the other one waits, and start it again."""
        first = self.nodes[0]
        # A node that has just taken a place may still be shown as a spare.
        states = ["spare", "train"]
        first.until(lambda: sorted(map(self.state, (1, 2))) == states, "spare", LIMIT_SECONDS)
        trains = 2 if self.state(1) == "spare" else 1

        def kill() -> LiveRun:
            self.nodes[trains].close()
            return first

        found = loss_of(first, kill)
        (self.folder / f"state-{trains}" / "health.json").unlink(missing_ok=True)
        self.nodes[trains] = self.start(trains)
        return found

    def close(self) -> None:
        for each in self.nodes:
            each.close()


def rows(trials: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tandem-spares-") as name:
        job = Job(Path(name), trials)
        try:
            found = [job.replace() for _ in range(trials)]
            digest = weights(job.nodes[0])
        finally:
            job.close()
        is_equal = digest == undisturbed(Path(name, "calm"), 2, *job.steps)
    seconds = [each.seconds for each in found]
    median = statistics.median(seconds)
    row = Row(
        "the node other than node 0 killed with its agent, one spare",
        trials,
        f"{outcome(found, is_equal)}; median {median:.1f} s ({min(seconds):.1f} to {max(seconds):.1f})",
        target="all lose at most 1 step and read no checkpoint; equal bits; "
        f"median at most {MOST_SECONDS:g} s",
        passed=is_equal and all(each.is_small for each in found) and median <= MOST_SECONDS,
        seconds=median,
    )
    return [row]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(rows(asked.trials), asked.json)


if __name__ == "__main__":
    sys.exit(main())
