"""Measure the time from the command to the first step of all ranks, and the memory that a run then uses.

    python benchmarks/launch_cost.py [--rounds 5] [--nodes 2,8,16] [--json FILE]

`tandem launch` is compared with torchrun, which starts the same trainer: two ranks on one node, and two nodes
with one rank each. Both also start the same plain DDP script, measured up to the end of its first epoch of
ten short steps. After that, many nodes are simulated on one machine. Memory is the sum over all processes,
with shared pages counted once (PSS).
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
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from live_runs import LiveRun, memory_of, tree_of
from marked import marked, started
from table import Row, finish

LIMIT_SECONDS = 300.0
SETTLED_SECONDS = 2.0
FLAGS = ("--steps", 10_000_000, "--threads", 1, "--log-every", 50, "--progress", "off")
TRAINER = ("-m", "tandem", "train")
SCRIPT = Path(__file__).parents[1] / "tests" / "scripts" / "programs" / "ddp_tutorial.py"


class Start(NamedTuple):
    """A program with its arguments, and the flags that follow the task's."""

    launcher: Sequence[object]
    flags: Sequence[object] = ()


class Cost(NamedTuple):
    seconds: float
    megabytes: float


def megabytes(pids: Sequence[int]) -> float:
    return sum(map(memory_of, pids)) / 2**20


def cost(folder: Path, starts: Sequence[Start]) -> Cost:
    """Measure a run that is started once on each node."""
    began = time.time()
    with ExitStack() as opened:
        runs = [
            opened.enter_context(LiveRun([*map(str, launcher)], folder, *flags, *FLAGS))
            for launcher, flags in starts
        ]
        runs[0].until(lambda: bool(runs[0].events("training")), "first step", LIMIT_SECONDS)
        seconds = float(runs[0].events("training")[0]["time"]) - began
        time.sleep(SETTLED_SECONDS)
        return end_of([pid for run in runs for pid in tree_of(run.process.pid)], seconds)


def end_of(pids: Sequence[int], seconds: float) -> Cost:
    """Return the cost of a start that took `seconds`; then kill its processes."""
    found = Cost(seconds, megabytes(pids))
    for pid in pids[::-1]:  # torchrun's ranks are in sessions of their own
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def cost_of_script(folder: Path, *launcher: object) -> Cost:
    """Measure two ranks of a plain script, until it has written its first snapshot."""
    snapshot = folder / "snapshot.pt"
    began = time.monotonic()
    output = folder / "output.txt"
    words = [*map(str, launcher), str(SCRIPT), "--epochs", "1000000", "--snapshot", str(snapshot)]
    with started(
        [sys.executable, "-m", *words], marked({**os.environ, "OMP_NUM_THREADS": "1"}), output
    ) as process:
        while not snapshot.exists():
            if process.poll() is not None or time.monotonic() > began + LIMIT_SECONDS:
                raise RuntimeError(f"no first step:\n{output.read_text(errors='replace')}")
            time.sleep(0.002)
        seconds = time.monotonic() - began
        time.sleep(SETTLED_SECONDS)
        return end_of(tree_of(process.pid), seconds)


def of_tandem(*flags: object) -> list[Start]:
    return [Start(("tandem", "launch"), flags)]


def two_nodes() -> list[Start]:
    place = ("--nodes", 2, "--master", f"127.0.0.101:{_port()}", "--node-rank")
    return [Start(("tandem", "launch"), (*place, number)) for number in (0, 1)]


def of_torchrun() -> list[Start]:
    return [Start(("torch.distributed.run", "--nproc-per-node", 2, *TRAINER))]


def two_torchruns() -> list[Start]:
    place = ("--nnodes", 2, "--nproc-per-node", 1, "--master-addr", "127.0.0.1", "--master-port", _port())
    return [Start(("torch.distributed.run", *place, "--node-rank", number, *TRAINER)) for number in (0, 1)]


def _port() -> int:
    return 20_000 + random.randrange(10_000)


def beside(
    name: str, ours: Callable[[Path], Cost], theirs: Callable[[Path], Cost], rounds: int
) -> list[Row]:
    """Return two rows that compare seconds and memory."""
    found: dict[bool, list[Cost]] = {True: [], False: []}
    for number in range(rounds):
        for is_ours in (number % 2 == 0, number % 2 == 1):
            with tempfile.TemporaryDirectory(prefix="tandem-launch-") as folder:
                found[is_ours].append((ours if is_ours else theirs)(Path(folder)))
    rows = []
    for what, unit, which, target in (("first step", "s", 0, 0.65), ("memory", "MB", 1, 1.0)):
        mine, other = ([each[which] for each in found[is_ours]] for is_ours in (True, False))
        ratio = statistics.median(mine) / statistics.median(other)
        rows.append(
            Row(
                f"{name}: {what}",
                rounds,
                f"{statistics.median(mine):,.1f} {unit} ({min(mine):,.1f} to {max(mine):,.1f})",
                f"torchrun {statistics.median(other):,.1f} {unit} ({min(other):,.1f} to {max(other):,.1f})",
                f"{ratio:.2f}",
                f"at most {target:g}",
                ratio <= target,
                rounds,
                *((statistics.median(mine), statistics.median(other)) if unit == "s" else ()),
            )
        )
    return rows


def simulated(nodes: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="tandem-launch-") as folder:
        found = cost(Path(folder), of_tandem("--nodes", nodes, "--batch-size", nodes * -(-240 // nodes)))
    return Row(
        f"{nodes} simulated nodes: first step and memory",
        1,
        f"{found.seconds:.1f} s, {found.megabytes:,.0f} MB",
        passed=None,
        seconds=found.seconds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", default="2,8,16")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = beside(
        "two ranks on one node",
        lambda folder: cost(folder, of_tandem("--nproc", 2)),
        lambda folder: cost(folder, of_torchrun()),
        options.rounds,
    )
    rows += beside(
        "two nodes with one rank each",
        lambda folder: cost(folder, two_nodes()),
        lambda folder: cost(folder, two_torchruns()),
        options.rounds,
    )
    rows += beside(
        "two ranks of a script",
        lambda folder: cost_of_script(
            folder,
            *("tandem", "launch", "--nproc", 2, "--run-dir", folder / "run"),
            *("--metrics", 0, "--metrics-linger", 0),
        ),
        lambda folder: cost_of_script(folder, "torch.distributed.run", "--nproc-per-node", 2),
        options.rounds,
    )
    rows += [simulated(int(nodes)) for nodes in options.nodes.split(",") if nodes]
    return finish(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
