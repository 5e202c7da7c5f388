"""Plant faults on some of eight nodes: does the node check name the right ones, and only those?

    python benchmarks/join_trials.py [--trials 5] [--healthy-trials 3] [--busy-trials 5] [--json FILE]

The nodes are network namespaces on this machine (needs root); tests/trials/joining.py has the faults. In each
trial, four of the nodes have one fault each: a tenth of the others' bandwidth, a tenth of a core, a read-only
volume, a clock that is off. In a healthy trial, none has. A busy trial has the faults, and runs next to two
other processes per core that compute without end.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from table import Row, finish

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from trials.joining import NODES, REASONS, JoiningNodes, drawn_faults, joining_nodes  # noqa: E402

LONGEST_SECONDS = 3.0
HOGS_PER_CORE = 2


@dataclass
class Counts:
    """`right`: faulty nodes named for their fault only. `wrong`: healthy nodes that were named."""

    planted: int = 0
    right: int = 0
    healthy: int = 0
    wrong: int = 0
    seconds: list[float] = field(default_factory=list)

    def add(self, nodes: JoiningNodes, faults: dict[str, int]) -> None:
        """Run one trial."""
        checked = nodes.check(faults)
        found = checked.named()
        self.planted += len(faults)
        self.right += sum(found.get(node) == [REASONS[fault]] for fault, node in faults.items())
        self.healthy += NODES - len(faults)
        self.wrong += len(set(found) - set(faults.values()))
        self.seconds.append(checked.verdict["seconds"])
        print(f"{faults} -> {found}, {self.seconds[-1]:.2f} s", file=sys.stderr, flush=True)

    def rows(self, where: str) -> Iterator[Row]:
        """Yield one row for faulty nodes and one for healthy ones."""
        said = f"right node and reason {self.right} of {self.planted}"
        yield Row(f"faulty node{where}", self.planted, said, target="all", passed=self.right == self.planted)
        said = f"named {self.wrong} of {self.healthy}"
        yield Row(f"healthy node{where}", self.healthy, said, target="none", passed=not self.wrong)


@contextmanager
def hogs() -> Iterator[None]:
    """Run processes that compute without end."""
    count = HOGS_PER_CORE * len(os.sched_getaffinity(0))
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def rows(trials: int, healthy_trials: int, busy_trials: int) -> list[Row]:
    """Run all trials."""
    calm = Counts()
    busy = Counts()
    made = tempfile.TemporaryDirectory(prefix="tandem-joining-")
    with made as folder, joining_nodes(Path(folder)) as nodes:
        for number in range(trials + healthy_trials):
            calm.add(nodes, drawn_faults() if number < trials else {})
        with hogs():
            for _ in range(busy_trials):
                busy.add(nodes, drawn_faults())
    found = list(calm.rows(""))
    longest = max(calm.seconds, default=0.0)
    found.append(
        Row(
            "time that the check takes",
            len(calm.seconds),
            f"{longest:.1f} s at most",
            target=f"at most {LONGEST_SECONDS:.0f} s",
            passed=longest <= LONGEST_SECONDS,
        )
    )
    return found + list(busy.rows(f", {HOGS_PER_CORE} busy processes per core"))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5, help="with four faults each")
    parser.add_argument("--healthy-trials", type=int, default=3)
    parser.add_argument("--busy-trials", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(rows(asked.trials, asked.healthy_trials, asked.busy_trials), asked.json)


if __name__ == "__main__":
    sys.exit(main())
