"""Measure how much host memory a resume needs at its peak, in multiples of the state's size.

    python benchmarks/big_resume.py [--gigabytes 10] [--ranks 1] [--json benchmarks/results/big_resume.json]

A run saves its state after one step, and a second launch resumes from it. While the state is loaded, the
benchmark keeps reading the memory of all processes that is not backed by a file (anonymous and shared, each
page once). The result is per rank, in multiples of the checkpoint's size. Memory that the next step needs
anyway, mainly for gradients, does not count. Needs free memory of 2.3 times the state, because a save makes a
copy, and disk space for one.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from live_runs import LiveRun, memory_of, session_of
from table import Row, finish

TASK = Path(__file__).with_name("big_task.py")
MOST_STATES = 1.3
LIMIT_SECONDS = 1500.0


def launch(folder: Path, ranks: int, gigabytes: float, steps: int) -> LiveRun:
    flags = ("--task", f"{TASK}:Big", "--task.gigabytes", gigabytes, "--batch-size", 8, "--steps", steps)
    waits = ("--phase-timeout", 1200, "--hang-timeout", 600, "--shutdown-timeout", 600)
    small = ("--snapshot-every", "never", "--checkpoint-keep", 1, "--checkpoint-every", "never")
    return LiveRun(("tandem", "launch", "--nproc", str(ranks)), folder, *flags, *waits, *small)


def memory(leader: int) -> int:
    """Return the bytes of memory, not backed by files, of a session's processes."""
    return sum(memory_of(pid, "Pss_Anon", "Pss_Shmem") for pid, _ in session_of(leader))


def measured(folder: Path, ranks: int, gigabytes: float) -> tuple[float, float, float]:
    """Return (bytes of the checkpoint, peak bytes of memory in the resume, seconds until it is loaded)."""
    with launch(folder, ranks, gigabytes, 1) as run:
        if run.wait(LIMIT_SECONDS):
            raise RuntimeError(run.words())
    (step,) = (folder / "checkpoints").glob("step-*")
    size = sum(path.stat().st_size for path in step.iterdir())
    began, most = time.monotonic(), 0
    with launch(folder, ranks, gigabytes, 1_000_000) as run:
        while not run.events("resumed"):
            if run.process.poll() is not None or time.monotonic() - began > LIMIT_SECONDS:
                raise RuntimeError(run.words())
            most = max(most, memory(run.process.pid))
            time.sleep(0.02)
        return size, most, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=10.0, help="of a rank's state")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the checkpoint lies; default is a temporary one")
    parser.add_argument("--json", type=Path, help="write the row there, too")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="big-resume-", dir=asked.folder))
    try:
        size, most, seconds = measured(folder / "run", asked.ranks, asked.gigabytes)
    finally:
        shutil.rmtree(folder)
    states = most / size / asked.ranks
    row = Row(
        f"host memory of a resume, {asked.ranks} ranks with {size / 1e9:.1f} GB of state each",
        1,
        f"{most / 1e9:.2f} GB peak, {seconds:.0f} s to load",
        f"state {size / 1e9:.2f} GB",
        f"{states:.2f} states per rank",
        f"at most {MOST_STATES}",
        states <= MOST_STATES,
        seconds=seconds,
    )
    return finish([row], asked.json)


if __name__ == "__main__":
    sys.exit(main())
