"""Measure the time from the command to 98% accuracy, with 2 ranks on CPUs: MNIST recipes and tandem.

    python benchmarks/time_to_98.py [--rounds 1] [--only tutorial] [--json benchmarks/results/time_to_98.json]

All programs train on the digits task's 60,000 images, generated in advance, and are tested with the same
10,000. The recipes (mnist_recipes.py) read them as MNIST through torchvision, and are started by torchrun.
tandem runs as `tandem launch --nproc 2` with the default task and settings. It also runs with settings for
someone who needs only 98%: planned for one epoch, and tested every 60 steps of 240 images. (The recipes test
after each epoch, because that is how their loops are written.) The time ends with the line that shows an
accuracy of at least 98%; then the run is stopped. Every round runs all programs. A program that does not get
there within --limit seconds counts with that time, and the ratio says "at least". On a busy machine, the wall
time of ranks that wait for each other is not reliable, so the CPU time of all processes is shown as well.
"""

import argparse
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from data_path import DATA, digits_folder
from table import Row, finish

RANKS = 2
LEAST_RATIO = 10
STOP_SECONDS = 60
HERE = Path(__file__).resolve().parent
ACCURACY = re.compile(r"accuracy (\d\.\d+)")


OURS = ("tandem", "tandem-short")
MARK = "TIME_TO_98"  # in the environment of all processes of a run


class Taken(NamedTuple):
    """Seconds to the accuracy, the CPU time of all processes until then, and the line that showed it.

    `reached` False: the limit was hit; the last such line.
    """

    seconds: float
    cpu: float
    line: str
    reached: bool = True


def recipe(name: str) -> Callable[[Path, Path, int], list[str]]:
    def command(data: Path, _run: Path, samples: int) -> list[str]:
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
        script = [str(HERE / "mnist_recipes.py"), name, str(data), "--samples", str(samples)]
        return [sys.executable, "-m", *torchrun, *script]

    return command


def tandem(*flags: str) -> Callable[[Path, Path, int], list[str]]:
    def command(data: Path, run: Path, samples: int) -> list[str]:
        length = [] if samples == 60_000 else ["--task.train-samples", str(samples)]
        folders = ["--data-dir", str(data), "--run-dir", str(run), *length]
        ports = ["--metrics", "0", "--metrics-linger", "0"]
        return [sys.executable, "-m", "tandem", "launch", "--nproc", str(RANKS), *folders, *ports, *flags]

    return command


SHORT = ("--epochs", "1", "--eval-every", "60")
CONTENDERS = {
    "tandem": ("tandem launch --nproc 2", tandem()),
    "tandem-short": (f"tandem launch --nproc 2 {' '.join(SHORT)}", tandem(*SHORT)),
    "tutorial": ("the tutorials' script", recipe("tutorial")),
    "example": ("the recipe of pytorch/examples under DDP", recipe("example")),
}


def time_to(accuracy: float, command: Sequence[str], folder: Path, limit: float) -> Taken:
    """Start the command and read its output. Raises SystemExit if it ends too early."""
    foreign = ("TANDEM_", "OMP_", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    mark = str(time.monotonic_ns())
    environment |= {"PYTHONPATH": str(HERE.parent / "src"), MARK: mark}
    began, said = time.monotonic(), []
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    too_late = threading.Event()
    spent = 0.0

    def give_up() -> None:
        nonlocal spent
        spent = cpu_seconds(mark)
        too_late.set()
        process.terminate()

    timer = threading.Timer(limit, give_up)
    timer.start()
    try:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.strip())
            found = ACCURACY.search(line)
            if found and float(found[1]) >= accuracy and not too_late.is_set():
                return Taken(time.monotonic() - began, cpu_seconds(mark), line.strip())
        if not too_late.is_set():
            raise SystemExit(f"{' '.join(command)} ended without {accuracy:.0%}:\n" + "\n".join(said[-20:]))
        scores = [line for line in said if ACCURACY.search(line)]
        return Taken(limit, spent, scores[-1] if scores else "not tested yet", reached=False)
    finally:
        timer.cancel()
        _stop(process)


def cpu_seconds(mark: str) -> float:
    """Return the CPU time of all processes with that mark, and of their ended children."""
    ticks = 0
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                ticks += sum(map(int, (folder / "stat").read_text().rpartition(")")[2].split()[11:15]))
        except OSError:  # gone, or not ours
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def measure(
    data: Path, only: Sequence[str], rounds: int, accuracy: float, limit: float, samples: int
) -> list[Row]:
    digits_folder(data)
    found: dict[str, list[Taken]] = {name: [] for name in (*OURS, *only)}
    for number in range(rounds):
        names = list(found) if number % 2 == 0 else list(reversed(found))
        for name in names:
            with tempfile.TemporaryDirectory(prefix="time-to-98-") as folder:
                command = CONTENDERS[name][1](data, Path(folder) / "run", samples)
                taken = time_to(accuracy, command, Path(folder), limit)
            found[name].append(taken)
            words = f"{taken.seconds:.1f} s, {taken.cpu:.1f} s of CPU: {taken.line}"
            print(f"round {number + 1}: {name} {words}", file=sys.stderr, flush=True)
    pairs = [(mine, name) for name in only for mine in OURS]
    return [row for mine, name in pairs for row in _rows(mine, name, found[mine], found[name], accuracy)]


def _rows(who: str, name: str, mine: list[Taken], control: list[Taken], accuracy: float) -> list[Row]:
    """Return the rows by wall time and by CPU time."""
    clock, cpu = (
        statistics.median(b[of] / a[of] for a, b in zip(mine, control, strict=True)) for of in (0, 1)
    )
    least = "" if all(each.reached for each in control) else "at least "
    target = LEAST_RATIO if (who, name) == ("tandem-short", "tutorial") else None
    what, peer, trials = f"to {accuracy:.0%}: {CONTENDERS[who][0]}", CONTENDERS[name][0], len(mine)
    return [
        Row(
            what,
            trials,
            _spread(mine),
            f"{peer} {_spread(control)}",
            f"{least}{clock:.1f} times shorter",
            f"at least {target} times" if target else "",
            clock >= target if target else None,
            len(control),
            statistics.median(each.seconds for each in mine),
            statistics.median(each.seconds for each in control),
        ),
        Row(
            f"{what}, CPU time",
            trials,
            f"{statistics.median(each.cpu for each in mine):.1f} s",
            f"{peer} {statistics.median(each.cpu for each in control):.1f} s",
            f"{least}{cpu:.1f} times less",
            passed=None,
            control_trials=len(control),
            seconds=statistics.median(each.cpu for each in mine),
            control_seconds=statistics.median(each.cpu for each in control),
        ),
    ]


def _spread(taken: list[Taken]) -> str:
    values = [each.seconds for each in taken]
    spread = f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else ""
    words = "" if all(each.reached for each in taken) else f", not reached: {taken[-1].line}"
    return f"{statistics.median(values):.1f} s{spread}{words}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    recipes = [name for name in CONTENDERS if name not in OURS]
    parser.add_argument("--only", nargs="+", choices=recipes, default=recipes, help="beside tandem")
    parser.add_argument("--accuracy", type=float, default=0.98)
    parser.add_argument("--limit", type=float, default=900, help="seconds for each")
    parser.add_argument("--samples", type=int, default=60_000, help="to train with")
    parser.add_argument("--data-dir", type=Path, default=DATA, help=f"[{DATA}]")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    # The run in hand is stopped, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    table = measure(asked.data_dir, asked.only, asked.rounds, asked.accuracy, asked.limit, asked.samples)
    return finish(table, asked.json)


if __name__ == "__main__":
    sys.exit(main())
