"""Plant faults on some of eight nodes: does the node check name the right ones, and only those?

    python benchmarks/join_trials.py [--trials 5] [--healthy-trials 3] [--json FILE]

The nodes are network namespaces on this machine (needs root); tests/trials/joining.py has the faults. In each
trial, four of the nodes have one fault each: a tenth of the others' bandwidth, a tenth of a core, a read-only
volume, a clock that is off. In a healthy trial, none has.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from table import Row, finish

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from trials.joining import NODES, REASONS, drawn_faults, joining_nodes  # noqa: E402

LONGEST_SECONDS = 3.0


def rows(trials: int, healthy_trials: int) -> list[Row]:
    """Run all trials. "Right" is the right node with the right reason, and no other one."""
    right = 0
    healthy = 0
    named = 0
    seconds = {True: list[float](), False: list[float]()}
    made = tempfile.TemporaryDirectory(prefix="tandem-joining-")
    with made as folder, joining_nodes(Path(folder)) as nodes:
        for number in range(trials + healthy_trials):
            is_faulty = number < trials
            faults = drawn_faults() if is_faulty else {}
            checked = nodes.check(faults)
            found = checked.named()
            right += sum(found.get(node) == [REASONS[fault]] for fault, node in faults.items())
            healthy += NODES - len(faults)
            wrong = set(found) - set(faults.values())
            named += len(wrong)
            seconds[is_faulty].append(checked.verdict["seconds"])
            print(f"{faults} -> {found}, {checked.verdict['seconds']:.2f} s", file=sys.stderr, flush=True)
            if wrong or len(found) < len(faults):
                print(checked.verdict, file=sys.stderr, flush=True)
    planted = trials * len(REASONS)
    longest = max(seconds[True] + seconds[False])
    return [
        Row(
            "node check: a faulty node",
            planted,
            f"right node and reason {right} of {planted}",
            target="all",
            passed=right == planted,
        ),
        Row(
            "node check: a healthy node",
            healthy,
            f"named {named} of {healthy}",
            target="none",
            passed=not named,
        ),
        Row(
            "node check: time of a start",
            trials + healthy_trials,
            f"{longest:.1f} s at most",
            target=f"at most {LONGEST_SECONDS:.0f} s",
            passed=longest <= LONGEST_SECONDS,
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5, help="with four faults each")
    parser.add_argument("--healthy-trials", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    return finish(rows(asked.trials, asked.healthy_trials), asked.json)


if __name__ == "__main__":
    sys.exit(main())
