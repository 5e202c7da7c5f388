"""One row of a benchmark's result, and the conversion of rows to a table and a JSON file.

    python benchmarks/table.py

A figure in benchmarks/results belongs to a commit. A program that would write there, and this one, exits with
2 if a source file that it measures, or that measures, differs from the commit.
"""

import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GENERATED = ("benchmarks/results", "docs", "README.md", "changes", "CHANGELOG.md")
"""What a benchmark or page.py writes, and what says nothing about how fast tandem is."""
SOURCES = r"(src|benchmarks)/(?!.*__pycache__)"
LOAD_BEFORE = round(os.getloadavg()[0], 1)
"""The 1-minute load average when the program started, so without the benchmark's own work."""


@dataclass(frozen=True)
class Row:
    """`outcome` of `trials`, that of the baseline (`control`) in the same run, and whether the target is met.

    `passed` None: there is no target, or it was not measured. `seconds` and `control_seconds`: the median of
    one trial on either side; None if the row times nothing, or an old file lacks it. `control_trials` None:
    there is no baseline, or its trials were not counted.
    """

    name: str
    trials: int
    outcome: str
    control: str = ""
    ratio: str = ""
    target: str = ""
    passed: bool | None = True
    control_trials: int | None = None
    seconds: float | None = None
    control_seconds: float | None = None


MET = {True: "yes", False: "**no**", None: ""}


def render(rows: Sequence[Row]) -> str:
    """Return a Markdown table without empty columns."""
    columns = {
        "what": [row.name for row in rows],
        "trials": [str(row.trials or "") for row in rows],
        "outcome": [row.outcome.replace("|", "/") for row in rows],
        "baseline": [row.control for row in rows],
        "its trials": [str(row.control_trials or "") for row in rows],
        "ratio": [row.ratio for row in rows],
        "target": [row.target for row in rows],
        "met": [MET[row.passed] for row in rows],
    }
    shown = {head: cells for head, cells in columns.items() if any(cells)}
    dashes = ["---:" if head.endswith("trials") else "---" for head in shown]
    lines = [f"| {' | '.join(line)} |" for line in (shown, *zip(*shown.values(), strict=True))]
    return "\n".join([lines[0], f"|{'|'.join(dashes)}|", *lines[1:]])


def machine() -> dict[str, object]:
    """Return facts about the machine, date, commit, and load before the start and at the end."""
    try:
        import torch
    except ImportError:  # a benchmark that needs only Docker
        release, gpus = None, []
    else:
        release = torch.__version__
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "tandem": tandem_version(),
        "torch": release,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpus": gpus,
        "load_before": LOAD_BEFORE,
        "load": round(os.getloadavg()[2], 1),
        "commit": _commit(),
        "command": " ".join([Path(sys.argv[0]).name, *map(_relative, sys.argv[1:])]),
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def tandem_version() -> str | None:
    """Return the version of this checkout; None if it has no source."""
    path = ROOT / "src" / "tandem" / "__init__.py"
    found = re.search(r'^__version__ = "(.+?)"', path.read_text(), re.M) if path.exists() else None
    return found and found[1]


def _git(*words: str) -> str | None:
    """Return the output of git; None outside a checkout."""
    command = ["git", "-C", str(ROOT), *words]
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None


def _commit() -> str | None:
    """Return the commit, with `-dirty` if a file that counts differs from it; None outside a checkout."""
    commit = _git("rev-parse", "--short", "HEAD")
    return commit and commit.strip() + ("-dirty" if changed_files() else "")


def changed_files() -> list[str]:
    """Return the files that differ from the commit: tracked ones without GENERATED, and new sources."""
    excluded = [f":(exclude){name}" for name in GENERATED]
    words = ("status", "--porcelain", "--no-renames", "--untracked-files=all", "--", ".", *excluded)
    lines = [(line[:2], line[3:]) for line in (_git(*words) or "").splitlines()]
    return [name for state, name in lines if state != "??" or re.match(SOURCES, name)]


def refuse_changes(path: Path | None = RESULTS) -> None:
    """Raise SystemExit with 2 if the figures are for RESULTS and a file differs from the commit.

    One line on stderr names the file. Call this before measuring.
    """
    changed = changed_files() if path is not None and path.resolve().is_relative_to(RESULTS) else []
    if not changed:
        return
    more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
    print(
        f"{Path(sys.argv[0]).name}: {changed[0]}{more} differs from the commit; figures in "
        "benchmarks/results belong to a commit: commit or stash the changes, or write elsewhere with "
        "--json /tmp/figures.json",
        file=sys.stderr,
    )
    raise SystemExit(2)


def _relative(word: str) -> str:
    """Return a path in this checkout as relative, so that results do not name the machine's directories."""
    path = Path(word)
    return str(path.relative_to(ROOT)) if path.is_absolute() and path.is_relative_to(ROOT) else word


def _are_results(word: str) -> bool:
    """Return whether an argument, `FILE` or `--json=FILE`, is a file in RESULTS."""
    name = word.partition("=")[2] if word.startswith("--") else word
    return name.endswith(".json") and Path(name).resolve().is_relative_to(RESULTS)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def save(found: Mapping[str, object], path: Path) -> None:
    """Write the results, and the machine they were measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


def write(rows: Sequence[Row], path: Path) -> None:
    """Write the rows, and the machine they were measured on, as JSON."""
    save({"rows": [asdict(row) for row in rows]}, path)


def finish(rows: Sequence[Row], path: Path | None) -> int:
    """Print the table, write the rows to `path`, and return the exit code: 1 for a missed target."""
    print(render(rows))
    if path is not None:
        write(rows, path)
    return int(any(row.passed is False for row in rows))


# Before anything is measured, because a measurement takes minutes to hours.
if __name__ == "__main__" or any(map(_are_results, sys.argv[1:])):
    refuse_changes()
