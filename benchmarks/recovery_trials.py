"""Measure the time from the SIGKILL of a rank or a node to the first optimizer step of all ranks.

    python benchmarks/recovery_trials.py [--trials 50] [--node-trials 20]

The same trainer and task run under `tandem launch` and, in the same benchmark, under torchrun. Both save
every 50 steps.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from live_runs import LiveRun
from table import Row, render

BETWEEN_KILLS = (0.3, 0.8)  # seconds of training before the next kill
FLAGS = ("--checkpoint-every", 50, "--log-every", 1000, "--threads", 1, "--steps", 10_000_000, "--lr", 0.01)
TARGETS = {2: 20.0, 4: 20.0}
CONTROLS = 3
CONTROL_SECONDS = 60.0


def worker_recovery(ranks: int, trials: int, torchrun_trials: int, folder: Path) -> Row:
    """Kill one random rank again and again."""
    launch = ("tandem", "launch", "--nproc", str(ranks), "--max-restarts", str(10 * trials))
    torchrun = ("torch.distributed.run", "--nproc-per-node", str(ranks), "--max-restarts", str(10 * trials))
    with LiveRun(launch, folder / f"tandem-{ranks}", *FLAGS) as run:
        ours = [recovery(run, random.choice(list(run.ranks().values()))) for _ in _after_start(run, trials)]
    with LiveRun((*torchrun, "-m", "tandem", "train"), folder / f"torchrun-{ranks}", *FLAGS) as run:
        theirs = [recovery(run, random.choice(run.workers())) for _ in _after_start(run, torchrun_trials)]
    ratio = statistics.median(theirs) / statistics.median(ours)
    return Row(
        f"a rank of {ranks} killed: to the first step of all ranks",
        trials,
        f"{len(ours)} of {trials} recover, median {statistics.median(ours):.2f} s, worst {max(ours):.2f} s",
        f"torchrun, {torchrun_trials} kills: median {statistics.median(theirs):.2f} s",
        f"{ratio:.1f} times faster",
        f"at least {TARGETS[ranks]:g} times",
        len(ours) == trials and ratio >= TARGETS[ranks],
        torchrun_trials,
        statistics.median(ours),
        statistics.median(theirs),
    )


def _after_start(run: LiveRun, trials: int) -> range:
    run.until(lambda: bool(run.events("training")), "first step")
    return range(trials)


def recovery(run: LiveRun, pid: int) -> float:
    """Return the seconds from the kill of `pid` to the next generation's first step.

    Trains a little before.
    """
    time.sleep(random.uniform(*BETWEEN_KILLS))
    worlds = len(run.events("training"))
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    return _next_world(run, worlds) - killed


def _next_world(run: LiveRun, worlds: int) -> float:
    """Return when (Unix seconds) the generation after the first `worlds` finished a step."""
    run.until(lambda: len(run.events("training")) > worlds, "next world")
    return float(run.events("training")[worlds]["time"])


def torchrun_survives(node: int, folder: Path) -> bool:
    """Return whether two torchrun agents, with no option but the address, survive the same fault.

    Raises RuntimeError if they do not even start.
    """
    place = ("--nnodes", "2", "--nproc-per-node", "1", "--master-addr", "127.0.0.1")
    place = (*place, "--master-port", str(20_000 + random.randrange(10_000)))
    nodes = [_torchrun(folder, place, index) for index in (0, 1)]
    try:
        survivor = nodes[1 - node]
        survivor.until(lambda: bool(survivor.events("training")), "first step")
        time.sleep(random.uniform(*BETWEEN_KILLS))
        worlds = len(survivor.events("training"))
        nodes[node].close()
        time.sleep(1.0)
        nodes[node] = _torchrun(folder, place, node)
        try:
            survivor.until(lambda: len(survivor.events("training")) > worlds, "next world", CONTROL_SECONDS)
        except RuntimeError:  # the survivor has ended, or waits for ever
            return False
        return True
    finally:
        for each in nodes:
            each.close()


def _torchrun(run_dir: Path, place: Sequence[str], index: int) -> LiveRun:
    launcher = ("torch.distributed.run", *place, "--node-rank", str(index), "-m", "tandem", "train")
    return LiveRun(launcher, run_dir, *FLAGS)


def node_recovery(node: int, trials: int, folder: Path) -> Row:
    """Kill a whole node and start it again 1 s later; the survivor has a restart budget of 0."""
    times, port = [], 20_000 + random.randrange(20_000)
    flags = (*FLAGS, "--max-restarts", 0, "--nodes", 2, "--master", f"127.0.0.101:{port}")

    def start(index: int) -> LiveRun:
        return LiveRun(("tandem", "launch", "--node-rank", str(index)), folder / f"nodes-{node}", *flags)

    nodes = [start(0), start(1)]
    try:
        survivor = nodes[1 - node]
        survivor.until(lambda: bool(survivor.events("training")), "first step")
        for _ in range(trials):
            time.sleep(random.uniform(*BETWEEN_KILLS))
            saved, worlds = len(survivor.events("checkpoint")), len(survivor.events("training"))
            # Starts that save nothing new wait longer each time, as those of a job that crashes.
            survivor.until(lambda saved=saved: len(survivor.events("checkpoint")) > saved, "save")  # type: ignore[misc]
            killed = time.time()
            nodes[node].close()
            time.sleep(1.0)
            nodes[node] = start(node)
            times.append(_next_world(survivor, worlds) - killed)
    except RuntimeError as error:
        print(error, file=sys.stderr)
    finally:
        for each in nodes:
            each.close()
    controls = [torchrun_survives(node, folder / f"torchrun-{node}-{trial}") for trial in range(CONTROLS)]
    name = "the node of rank 0 and the store" if node == 0 else "another node"
    return Row(
        f"{name} killed, back 1 s later",
        trials,
        f"{len(times)} of {trials} recover, median {statistics.median(times):.1f} s; no restart budget spent",
        f"default torchrun: {sum(controls)} of {CONTROLS} recover",
        target="all recover",
        passed=len(times) == trials,
        control_trials=CONTROLS,
        seconds=statistics.median(times),
    )


def rows(trials: int, node_trials: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tandem-recovery-") as name:
        folder = Path(name)
        return [
            *(worker_recovery(ranks, trials, max(3, trials // 5), folder) for ranks in (2, 4)),
            *(node_recovery(node, node_trials, folder) for node in (1, 0)),
        ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--node-trials", type=int, default=20)
    asked = parser.parse_args()
    print(render(rows(asked.trials, asked.node_trials)))
