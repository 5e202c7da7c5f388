"""Cause hangs of three kinds: is the right rank reported, how soon, and are there false alarms?

    python benchmarks/hang_trials.py [--trials 30] [--calm-minutes 30]

Kinds: a rank is stopped (SIGSTOP); the cable between two nodes in network namespaces is cut (needs root); one
rank of three skips a collective. To find false alarms, another run trains next to processes that use all
cores.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from live_runs import LiveRun
from table import Row, render

HANG_SECONDS = 2.0
ALERT_SECONDS = 1.0
FLAGS = ("--checkpoint-every", 100, "--log-every", 1000, "--threads", 1, "--steps", 10_000_000, "--lr", 0.01)
FLAGS = (*FLAGS, "--max-restarts", 1000, "--hang-timeout", HANG_SECONDS)


def stopped_rank(trials: int, folder: Path) -> Row:
    """Send SIGSTOP to a rank of one of two nodes."""
    delays, right = [], 0
    with LiveRun(("tandem", "launch", "--nodes", "2"), folder / "stopped", *FLAGS) as run:
        for trial in range(trials):
            _next_world(run, trial)
            time.sleep(random.uniform(0.5, 1.5))
            rank, pid = random.choice(list(run.ranks().items()))
            stopped = time.time()
            os.kill(pid, signal.SIGSTOP)
            event = _next_hang(run, trial)
            delays.append(float(event["time"]) - stopped - HANG_SECONDS)
            right += event["rank"] == rank
    return _row("rank frozen (SIGSTOP)", trials, right, delays)


def skipped_collective(trials: int, folder: Path) -> Row:
    """Let one of three ranks skip a collective, once in every generation."""
    task = folder / "skipping.py"
    task.write_text(SKIPPING)
    delays, right = [], 0
    for trial in range(trials):
        rank, mark = trial % 3, folder / f"skipped-{trial}.mark"
        flags = (*FLAGS, "--task", f"{task}:Skipping", "--task.who", rank, "--task.mark", mark)
        with LiveRun(("tandem", "launch", "--nproc", "3"), folder / f"skipped-{trial}", *flags) as run:
            event = _next_hang(run, 0)
            delays.append(float(event["time"]) - mark.stat().st_mtime - HANG_SECONDS)
            right += event["rank"] == rank
    return _row("one rank skips a collective", trials, right, delays)


SKIPPING = """
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from small_task import Small


@dataclass
class Skipping(Small):
    who: int = 0
    mark: str = ""
    calls: int = 0

    def loss(self, model, batch):
        self.calls += 1
        if self.calls == 40:
            if dist.get_rank() == self.who:
                Path(self.mark).touch()
            else:
                dist.barrier()
        return super().loss(model, batch)
"""


def cut_cable(trials: int, folder: Path) -> Row:
    """Take the link between two nodes down, and up again once the hang was reported."""
    names = [f"tandem-bench-{os.getpid()}-{end}" for end in "ab"]
    end = ("name", "cable", "netns")
    delays, right, runs = [], 0, []
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("link", "add", *end, names[0], "type", "veth", "peer", *end, names[1])
        for index, name in enumerate(names):
            _ip("-n", name, "addr", "add", f"10.78.0.{index + 1}/24", "dev", "cable")
            _ip("-n", name, "link", "set", "cable", "up")
        os.environ["GLOO_SOCKET_IFNAME"] = "cable"
        place = ("--nodes", 2, "--master", "10.78.0.1:29500", "--node-rank")
        runs = [
            LiveRun(("tandem", "launch"), folder / "cable", *FLAGS, *place, index, inside=name)
            for index, name in enumerate(names)
        ]
        for trial in range(trials):
            _next_world(runs[0], trial)
            time.sleep(random.uniform(0.5, 1.5))
            cut = time.time()
            _ip("-n", names[0], "link", "set", "cable", "down")
            event = _next_hang(runs[0], trial)
            _ip("-n", names[0], "link", "set", "cable", "up")
            delays.append(float(event["time"]) - cut - HANG_SECONDS)
            right += event["node"] == 1
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        for run in runs:
            run.close()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return _row("link down (network namespaces)", trials, right, delays)


def calm(minutes: float, folder: Path) -> Row:
    """Train with the default timeout next to one process per core that computes without end."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in os.sched_getaffinity(0)]
    flags = ("--checkpoint-every", 500, "--log-every", 1000, "--steps", 10_000_000, "--lr", 0.01)
    try:
        with LiveRun(("tandem", "launch", "--nodes", "2"), folder / "calm", *flags) as run:
            run.until(lambda: bool(run.events("training")), "first step")
            time.sleep(60 * minutes)
            alarms = len(run.events("hang"))
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()
    outcome = f"{alarms} false alarms in {minutes:g} minutes"
    return Row("training next to a CPU hog", 1, outcome, target="none", passed=alarms == 0)


def _next_world(run: LiveRun, seen: int) -> None:
    run.until(lambda: len(run.events("training")) > seen, "next world")


def _next_hang(run: LiveRun, seen: int) -> dict[str, object]:
    run.until(lambda: len(run.events("hang")) > seen, "hang")
    return run.events("hang")[seen]


def _row(name: str, trials: int, right: int, delays: list[float]) -> Row:
    worst = max(delays)
    return Row(
        name,
        trials,
        f"{right} of {trials} reported correctly; "
        f"alert {statistics.median(delays):.2f} s after the timeout, "
        f"worst {worst:.2f} s",
        target=f"all, within {ALERT_SECONDS:g} s",
        passed=right == trials and worst <= ALERT_SECONDS,
        seconds=statistics.median(delays),
    )


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def rows(trials: int, calm_minutes: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tandem-hangs-") as name:
        folder = Path(name)
        found = [stopped_rank(trials, folder), skipped_collective(trials, folder)]
        if os.geteuid() == 0:
            found.append(cut_cable(trials, folder))
        return [*found, calm(calm_minutes, folder)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--calm-minutes", type=float, default=30)
    asked = parser.parse_args()
    print(render(rows(asked.trials, asked.calm_minutes)))
