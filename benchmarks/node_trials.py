"""Kill nodes under ddp and ranks under fsdp: at most one step is lost, and the bits are equal.

    python benchmarks/node_trials.py [--node-trials 20] [--torchrun-trials 3] [--rank-trials 25] [--json FILE]

Three nodes train under ddp. Each in turn, including node 0 with the store, is killed with its agent and ranks
and started again. Under torchrun, the same fault ends the same script with the same checkpoints, and all
nodes are started again, as users do by hand. Under fsdp, a random one of two ranks is killed. With tandem,
one run takes all kills of its row, and its weights (SHA-256) are compared with those of an uninterrupted run.
A step counts as lost if its line was in the journal before the kill.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from live_runs import LiveRun
from table import Row, finish

NODES = 3
STEPS_BETWEEN = (10, 30)
STEPS_PER_KILL = 80
FLAGS = ("--threads", 1, "--lr", 0.01, "--log-every", 1, "--task.delay", 0.02)
EVERY = ("--checkpoint-every", 50)
LIMIT_SECONDS = 240.0


class Loss(NamedTuple):
    """The cost of a kill: seconds to the next step of all ranks, repeated steps, and the state's source."""

    seconds: float
    steps: int
    source: str

    @property
    def is_small(self) -> bool:
        """True if at most one step was lost, and nothing was read from the volume."""
        return self.steps <= 1 and self.source.startswith("memory")


def last_step(run: LiveRun) -> int:
    """Return the last step in the journal."""
    lines = run.lines("metrics.jsonl")
    return max((int(line["step"]) for line in lines if "step" in line), default=0)


def loss_of(run: LiveRun, kill: Callable[[], LiveRun]) -> Loss:
    """Train a little, `kill`, and wait until the next generation has finished a step.

    `kill` returns the process to watch from then on.
    """
    begin = last_step(run) + random.randint(*STEPS_BETWEEN)
    run.until(lambda: last_step(run) >= begin, f"step {begin}", LIMIT_SECONDS)
    worlds = len(run.events("training"))
    before = last_step(run)
    killed = time.time()
    run = kill()
    run.until(lambda: len(run.events("training")) > worlds, "next generation", LIMIT_SECONDS)
    resumed = run.events("resumed")[-1]
    seconds = float(run.events("training")[worlds]["time"]) - killed
    return Loss(seconds, before - int(resumed["step"]), str(resumed["source"]))


def undisturbed(folder: Path, ranks: int, *flags: object) -> str:
    """Return the SHA-256 of the weights of a run without kills."""
    with LiveRun(("tandem", "launch", "--nproc", str(ranks)), folder, *FLAGS, *flags) as run:
        return weights(run)


def weights(run: LiveRun) -> str:
    """Wait for a run to end, and return the SHA-256 of its weights."""
    if run.wait(LIMIT_SECONDS):
        raise RuntimeError(run.words())
    return str(run.summary()["weights_sha256"])


def start_nodes(folder: Path, launcher: Callable[[int], Sequence[str]], *flags: object) -> list[LiveRun]:
    return [LiveRun(launcher(node), folder, *FLAGS, *EVERY, *flags) for node in range(NODES)]


def lost_nodes(node: int, trials: int, folder: Path) -> tuple[list[Loss], bool]:
    """Return the cost of each kill of `node`, and whether the bits equal an uninterrupted run's."""
    steps = ("--steps", STEPS_PER_KILL * trials + 100)
    address = ("--nodes", NODES, "--master", f"127.0.0.101:{20_000 + random.randrange(20_000)}")
    flags = (*steps, *address, "--max-restarts", 0)
    run_dir = folder / f"node-{node}"

    def launcher(index: int) -> tuple[str, ...]:
        return "tandem", "launch", "--node-rank", str(index)

    nodes = start_nodes(run_dir, launcher, *flags)

    watched = nodes[(node + 1) % NODES]

    def restart() -> LiveRun:
        nodes[node].close()
        nodes[node] = LiveRun(launcher(node), run_dir, *FLAGS, *EVERY, *flags)
        return watched

    try:
        found = [loss_of(watched, restart) for _ in range(trials)]
        digests = [weights(each) for each in nodes]
    finally:
        for each in nodes:
            each.close()
    return found, digests == [undisturbed(folder / f"calm-{node}", NODES, *steps)] * NODES


def torchrun_by_hand(node: int, folder: Path) -> Loss:
    """Do the same kill under torchrun; then end all nodes and start them again."""

    def start() -> list[LiveRun]:
        port = str(20_000 + random.randrange(10_000))
        place = ("--nnodes", str(NODES), "--nproc-per-node", "1", "--master-addr", "127.0.0.1")

        def launcher(index: int) -> tuple[str, ...]:
            which = ("--master-port", port, "--node-rank", str(index))
            return "torch.distributed.run", *place, *which, "-m", "tandem", "train"

        return start_nodes(folder, launcher, "--steps", 1_000_000)

    nodes = start()

    def restart() -> LiveRun:
        for each in (nodes[node], *nodes):
            each.close()
        nodes[:] = start()
        return nodes[0]

    try:
        begun = nodes[0]
        begun.until(lambda: bool(begun.events("checkpoint")), "checkpoint", LIMIT_SECONDS)
        return loss_of(begun, restart)
    finally:
        for each in nodes:
            each.close()


def node_row(node: int, trials: int, torchrun_trials: int, folder: Path) -> Row:
    found, is_equal = lost_nodes(node, trials, folder)
    theirs = [torchrun_by_hand(node, folder / f"torchrun-{node}-{trial}") for trial in range(torchrun_trials)]
    ours = statistics.median(each.seconds for each in found)
    beside = statistics.median(each.seconds for each in theirs)
    again = statistics.median(each.steps for each in theirs)
    return Row(
        f"node {node} of {NODES} killed with its agent{' and the store' if node == 0 else ''}, back at once",
        trials,
        f"{outcome(found, is_equal)}; median {ours:.1f} s",
        f"torchrun, all started again by hand: median {beside:.1f} s, {again:.0f} steps lost",
        f"{beside / ours:.1f} times faster",
        "all lose at most 1 step and read no checkpoint; equal bits",
        is_equal and all(each.is_small for each in found),
        torchrun_trials,
        ours,
        beside,
    )


def outcome(found: Sequence[Loss], is_equal: bool) -> str:
    small = sum(each.is_small for each in found)
    return (
        f"{small} of {len(found)} lose at most 1 step and read no checkpoint, "
        f"final bits {'equal' if is_equal else 'differ'}"
    )


def kill_a_rank(run: LiveRun) -> LiveRun:
    os.kill(random.choice(list(run.ranks().values())), signal.SIGKILL)
    return run


def rank_row(trials: int, folder: Path) -> Row:
    """Kill a random one of two ranks under fsdp."""
    steps = ("--steps", STEPS_PER_KILL * trials + 100, "--strategy", "fsdp")
    launch = ("tandem", "launch", "--nproc", "2", "--max-restarts", str(2 * trials))
    with LiveRun(launch, folder / "fsdp", *FLAGS, *EVERY, *steps) as run:
        found = [loss_of(run, partial(kill_a_rank, run)) for _ in range(trials)]
        is_equal = weights(run) == undisturbed(folder / "calm-fsdp", 2, *steps)
    seconds = statistics.median(each.seconds for each in found)
    return Row(
        "a rank of 2 killed under fsdp",
        trials,
        f"{outcome(found, is_equal)}; median {seconds:.1f} s",
        target="all lose at most 1 step and read no checkpoint; equal bits",
        passed=is_equal and all(each.is_small for each in found),
        seconds=seconds,
    )


def rows(node_trials: int, torchrun_trials: int, rank_trials: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tandem-nodes-") as name:
        folder = Path(name)
        nodes = range(NODES if node_trials else 0)
        found = [node_row(node, node_trials, torchrun_trials, folder) for node in nodes]
        return [*found, *([rank_row(rank_trials, folder)] if rank_trials else [])]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--node-trials", type=int, default=20, help="kills of each node; 0 leaves these out")
    parser.add_argument("--torchrun-trials", type=int, default=3, help="of each node, at least 1")
    parser.add_argument("--rank-trials", type=int, default=25, help="kills of a rank under fsdp; 0: none")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(rows(asked.node_trials, asked.torchrun_trials, asked.rank_trials), asked.json)


if __name__ == "__main__":
    sys.exit(main())
