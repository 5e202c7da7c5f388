"""Inject many different faults into one run, one every few seconds, and measure what they cost.

    python benchmarks/chaos_trials.py [--faults 300] [--every 5] [--json FILE]

Two ranks train, and each fault is drawn from FAULTS. Goodput is the time that an uninterrupted run needs for
the same steps, divided by the time of this run. The uninterrupted speed is measured before and after. At the
end, the weights must equal those of an uninterrupted run bit for bit, which also proves that no sample was
left out or used twice.
"""

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from live_runs import LiveRun
from table import Row, finish

PACE_SHARE = 0.05  # of the steps under fire: how long each stretch for the pace is
FLAGS = (
    "--checkpoint-every",
    "2s",
    "--log-every",
    100,
    "--threads",
    1,
    "--lr",
    0.01,
    "--max-restarts",
    10_000,
)


def kill_rank(run: LiveRun, chance: random.Random) -> None:
    """Send SIGKILL to one rank."""
    os.kill(chance.choice(sorted(run.ranks().values())), signal.SIGKILL)


def kill_all_ranks(run: LiveRun, _chance: random.Random) -> None:
    """Send SIGKILL to all ranks at once."""
    for pid in run.ranks().values():
        os.kill(pid, signal.SIGKILL)


def crash_rank(run: LiveRun, chance: random.Random) -> None:
    """Cause a segmentation fault in one rank."""
    os.kill(chance.choice(sorted(run.ranks().values())), signal.SIGSEGV)


def pause_rank(run: LiveRun, chance: random.Random) -> None:
    """Stop one rank for a moment, like a preempted virtual machine."""
    pid = chance.choice(sorted(run.ranks().values()))
    os.kill(pid, signal.SIGSTOP)
    time.sleep(chance.uniform(0.05, 0.3))
    os.kill(pid, signal.SIGCONT)


def damage_checkpoint(run: LiveRun, chance: random.Random) -> None:
    """Flip a bit in the newest checkpoint, and kill a rank so that a checkpoint is read."""
    newest = max((run.run_dir / "checkpoints").glob("step-*/state.pt"), default=None)
    if newest is not None:
        raw = bytearray(newest.read_bytes())
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
        newest.write_bytes(raw)
    kill_rank(run, chance)


FAULTS: list[Callable[[LiveRun, random.Random], None]] = [
    *(kill_rank, kill_rank, kill_rank, kill_all_ranks, crash_rank, pause_rank, pause_rank, pause_rank),
    damage_checkpoint,
]


def under_fire(faults: int, every: float, folder: Path, seed: int = 0) -> Row:
    """Train while `faults` faults occur, one per `every` seconds, between two uninterrupted runs."""
    chance = random.Random(seed)
    stretch = max(500, int(PACE_SHARE * faults * every / _pace(folder / "first", 300)))
    before = _pace(folder / "before", stretch)
    steps = max(1500, int(faults * every / before))
    counts: Counter[str] = Counter()
    with LiveRun(("tandem", "launch", "--nproc", "2"), folder / "fire", *FLAGS, "--steps", steps) as run:
        run.until(lambda: bool(run.events("training")), "first step")
        began = time.time()
        for number in range(faults):
            due = began + (number + 1) * every
            while time.time() < due and run.process.poll() is None:
                time.sleep(0.01)
            if run.process.poll() is not None:
                break
            fault = chance.choice(FAULTS)
            try:
                fault(run, chance)
            except (ProcessLookupError, IndexError):
                continue  # between two worlds
            counts[fault.__name__] += 1
        code = run.wait(60 + 3 * steps * before)
        ended = max(float(event["time"]) for event in run.events("finished"))
        summary = run.summary()
    calm_seconds = steps * (before + _pace(folder / "after", stretch)) / 2
    reference = _finish(folder / "reference", steps, "--task.delay", 0)[0]  # the same numbers, sooner
    goodput = calm_seconds / (ended - began)
    equal = code == 0 and summary["weights_sha256"] == reference["weights_sha256"]
    what = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return Row(
        f"chaos: a fault every {every:g} s",
        sum(counts.values()),
        f"goodput {goodput:.1%}; weights {'equal' if equal else 'DIFFER'}; "
        f"{summary['restarts']} restarts of all ranks ({what})",
        f"uninterrupted run: {calm_seconds:.0f} s for {steps} steps",
        target="goodput at least 95%, weights equal",
        passed=equal and goodput >= 0.95,
        control_trials=2,
        seconds=ended - began,
        control_seconds=calm_seconds,
    )


def _pace(run_dir: Path, steps: int) -> float:
    """Return the seconds per step of an uninterrupted run."""
    return _finish(run_dir, steps)[1] / steps


def _finish(run_dir: Path, steps: int, *flags: object) -> tuple[dict[str, object], float]:
    """Return the summary of an uninterrupted run, and the seconds from its first step to its end."""
    flags = (*FLAGS, "--steps", steps, *flags)
    with LiveRun(("tandem", "launch", "--nproc", "2"), run_dir, *flags) as run:
        if run.wait(7200) != 0:
            sys.exit(run.output.read_text(errors="replace")[-2000:])
        began, ended = run.events("training")[0]["time"], run.events("finished")[0]["time"]
        return run.summary(), float(ended) - float(began)


def rows(faults: int, every: float) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as name:
        return [under_fire(faults, every, Path(name))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--every", type=float, default=5.0)
    parser.add_argument("--json", type=Path, help="write the row there, too")
    asked = parser.parse_args()
    sys.exit(finish(rows(asked.faults, asked.every), asked.json))
