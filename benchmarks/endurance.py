"""Kill ranks of a long run again and again: do memory or files grow, and does recovery become slower?

    python benchmarks/endurance.py [--steps 500000] [--kills 500] [--ranks 2] [--json FILE]
    python benchmarks/endurance.py --steps 1000000 --kills 0 --json FILE     without kills

A random rank is killed every `steps / kills` steps. Just before each kill, the benchmark records the memory
(PSS), threads and open files of the whole launch, and the files in its run directory, the temporary directory
and /dev/shm. It compares the medians of the first and the last tenth of the kills. These are an hour apart,
and the load of a shared host may change in that time. So for the recovery time, a new launch of the same job
trains next to the old one for another tenth of the steps. Ranks of both are killed in turn, and the old
launch's recovery is compared with the new one's. Without kills, the same values are recorded a hundred times.
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from live_runs import LiveRun, memory_of, session_of
from table import Row, finish

LIMIT_SECONDS = 600.0
LOOKS = 100
FLAGS = ("--log-every", 20, "--threads", 1, "--lr", 0.01, "--checkpoint-every", 250, "--task.delay", 0)
RECOVERY = 1.2
HELD = {
    "memory": ("MB", 1.1),
    "threads": ("threads", 1.05),
    "open files": ("files", 1.05),
    "files in the run, the temporary directory and /dev/shm": ("files", 1.1),
}
"""{what: (its unit, at most so many times the first tenth's)}."""


def last_lines(file: Path) -> list[dict[str, Any]]:
    """Return the last complete lines of a journal, which may be long; none if there are none."""
    try:
        with file.open("rb") as journal:
            journal.seek(max(0, journal.seek(0, os.SEEK_END) - 8192))
            lines = journal.read().split(b"\n")[1:-1]
        return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []


def step_of(run: LiveRun) -> int:
    return max((int(line["step"]) for line in last_lines(run.run_dir / "metrics.jsonl")), default=0)


def held(run: LiveRun, temporary: Path) -> dict[str, float]:
    """Return the memory, threads and files that the launch has now."""
    found = {"memory": 0.0, "threads": 0.0, "open files": 0.0}
    for pid, _ in session_of(run.process.pid):
        process = Path(f"/proc/{pid}")
        found["memory"] += memory_of(pid) / 2**20
        try:
            found["threads"] += len(os.listdir(process / "task"))
            found["open files"] += len(os.listdir(process / "fd"))
        except OSError:  # ended meanwhile
            continue
    places = (run.run_dir, temporary, Path("/dev/shm"))
    files = sum(len(names) for place in places for _, _, names in os.walk(place))
    return {**found, "files in the run, the temporary directory and /dev/shm": float(files)}


def kill_one(run: LiveRun) -> float:
    """Return the seconds from the kill of a rank to the first step of the next generation."""

    def began() -> list[float]:
        lines = last_lines(run.run_dir / "events.jsonl")
        return [line["time"] for line in lines if line["kind"] == "training" and line["time"] > killed]

    killed = time.time()
    os.kill(random.choice(list(run.ranks().values())), signal.SIGKILL)
    run.until(lambda: bool(began()), "next world", LIMIT_SECONDS)
    return float(began()[0]) - killed


def reach(run: LiveRun, number: int, every: int) -> None:
    """Return a random step between the kills before and after kill `number`."""
    target = number * every + random.randrange(every // 4, 3 * every // 4)
    run.until(lambda: step_of(run) >= target, f"step {target}", LIMIT_SECONDS)


def endure(steps: int, kills: int, ranks: int, folder: Path) -> list[Row]:
    every, tenth = steps // kills, max(1, kills // 10)
    total = steps + tenth * every + 1000  # they are not done when the last is killed
    launch = ("tandem", "launch", "--nproc", str(ranks), "--max-restarts", str(2 * kills))
    found: dict[str, list[float]] = {what: [] for what in HELD}
    before, last, control = list[float](), list[float](), list[float]()

    def begin(name: str) -> LiveRun:
        (folder / f"{name}-tmp").mkdir()
        flags = (*FLAGS, "--steps", total)
        return LiveRun(launch, folder / name, *flags, variables={"TMPDIR": str(folder / f"{name}-tmp")})

    with begin("run") as run:
        for number in range(kills):
            reach(run, number, every)
            for what, value in held(run, folder / "run-tmp").items():
                found[what].append(value)
            before.append(kill_one(run))
        with begin("new") as new:
            new.until(lambda: step_of(new) >= every // 4, "first steps", LIMIT_SECONDS)
            for number in range(kills, kills + tenth):
                reach(run, number, every)
                pair = [(run, last), (new, control)]
                for each, taken in pair if number % 2 else pair[::-1]:
                    taken.append(kill_one(each))
        code = run.wait(LIMIT_SECONDS + steps)
        summary = run.summary()
        expected = (0, total, kills + tenth)
        assert (code, summary["global_step"], summary["restarts"]) == expected, run.words()
    return [
        _recovery(before, last, control),
        *(_row(what, values, kills) for what, values in found.items()),
    ]


def left_alone(steps: int, ranks: int, folder: Path) -> list[Row]:
    """Return the same values of a launch without kills, at each hundredth of its steps but the last."""
    found: dict[str, list[float]] = {what: [] for what in HELD}
    (folder / "run-tmp").mkdir()
    launch = ("tandem", "launch", "--nproc", str(ranks))
    variables = {"TMPDIR": str(folder / "run-tmp")}
    with LiveRun(launch, folder / "run", *FLAGS, "--steps", steps, variables=variables) as run:
        for look in range(1, LOOKS):
            step = look * steps // LOOKS
            run.until(lambda step=step: step_of(run) >= step, f"step {step}", LIMIT_SECONDS)  # type: ignore[misc]
            for what, value in held(run, folder / "run-tmp").items():
                found[what].append(value)
        code = run.wait(LIMIT_SECONDS + steps)
        assert (code, run.summary()["restarts"]) == (0, 0), run.words()
    return [_row(what, values, len(values)) for what, values in found.items()]


def _recovery(before: list[float], last: list[float], control: list[float]) -> Row:
    old, new, start = (statistics.median(each) for each in (last, control, before[: len(last)]))
    return Row(
        "recovery",
        len(before) + len(last),
        f"{old:.2f} s after {len(before)} kills (worst {max(before + last):.2f})",
        f"a new launch, killed alternately: {new:.2f} s; this launch at its start: {start:.2f} s",
        f"{old / new:.3f}",
        f"at most {RECOVERY}",
        old <= RECOVERY * new,
        len(control),
        old,
        new,
    )


def _row(what: str, values: list[float], kills: int) -> Row:
    unit, limit = HELD[what]
    tenth = max(1, kills // 10)
    first, last = statistics.median(values[:tenth]), statistics.median(values[-tenth:])
    return Row(
        what,
        kills,
        f"{last:,.2f} {unit} at the end (worst {max(values):,.2f})",
        f"{first:,.2f} {unit} at the start",
        f"{last / first:.3f}",
        f"at most {limit}",
        last <= limit * first,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=500_000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-endurance-") as name:
        if options.kills:
            rows = endure(options.steps, options.kills, options.ranks, Path(name))
        else:
            rows = left_alone(options.steps, options.ranks, Path(name))
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
