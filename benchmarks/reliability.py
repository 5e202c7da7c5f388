"""Measure everything that tandem promises about surviving failures: one table, one JSON file.

    python benchmarks/reliability.py [--full] [--json FILE] [part ...]

Parts: store, resume, own-loops, saves, recovery, hangs, pauses, chaos. `--full` runs the full number of
trials in about five hours, most of them for the pauses, the half hour without hangs, the 25 minutes of chaos
and the resumes; without it, each part takes a few minutes. With `--full`, each part is written to
benchmarks/results separately. Every figure is next to its baseline, which is measured in the same run.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import chaos_trials
import hang_trials
import own_loop_trials
import pause_trials
import recovery_trials
import resume_trials
import save_trials
import store_trials
from table import RESULTS, Row, refuse_changes, render, write

PARTS: dict[str, Callable[[bool], list[Row]]] = {
    "store": store_trials.rows,
    "resume": lambda full: resume_trials.exact_resume(
        trials=25 if full else 5, control=10 if full else 2
    ),
    "own-loops": lambda full: own_loop_trials.rows(kills=10 if full else 2),
    "saves": lambda full: save_trials.rows(100, 20 if full else 8),
    "recovery": lambda full: recovery_trials.rows(50 if full else 10, 20 if full else 3),
    "hangs": lambda full: hang_trials.rows(30 if full else 5, 30 if full else 1),
    "pauses": lambda full: pause_trials.rows(100 if full else 12, 60 if full else 15),
    "chaos": lambda full: chaos_trials.rows(300 if full else 20, 5.0),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", default=list(PARTS), metavar="part")
    parser.add_argument("--full", action="store_true", help="full counts")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    asked = parser.parse_args()
    unknown = sorted(set(asked.parts) - set(PARTS))
    if unknown:
        parser.error(f"no part {unknown[0]}; there are {', '.join(PARTS)}")
    if asked.full:
        refuse_changes()
    rows: list[Row] = []
    for part in asked.parts:
        print(f"{part} ...", file=sys.stderr, flush=True)
        rows += (found := PARTS[part](asked.full))
        if asked.full:
            write(found, RESULTS / f"reliability_{part}.json")
        if asked.json:
            write(rows, asked.json)
    print(render(rows))
    return int(not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
