"""One line of a benchmark's outcome, and how many lines become a table and a JSON file."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

LOAD_BEFORE = round(os.getloadavg()[0], 1)
"""The 1-minute load average when the program started, so without the benchmark's own work."""


@dataclass(frozen=True)
class Row:
    """`outcome` of `trials`, that of a `control` in the same run, and whether the target is met.

    `passed` None: there is no target, or it was not measured. `seconds` and `control_seconds` are one trial's
    median on either side; None where the row times nothing, or where an old file does not have it.
    `control_trials` None: there is no baseline, or its trials were not counted.
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
    """A Markdown table. A column that no row fills is left out."""
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
    """What is measured on, when, of which commit, and how busy the machine was before and at the end."""
    try:
        import torch
    except ImportError:  # a benchmark that needs only Docker
        release, gpus = None, []
    else:
        release = torch.__version__
        gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "torch": release,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpus": gpus,
        "load_before": LOAD_BEFORE,
        "load": round(os.getloadavg()[2], 1),
        "commit": _commit(),
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _commit() -> str | None:
    """Of this checkout, with `-dirty` if a tracked file differs from it; None outside a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.check_output(words, text=True, stderr=subprocess.DEVNULL, timeout=30).strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def save(found: Mapping[str, object], path: Path) -> None:
    """What was found, and the machine it was measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **found}, indent=1) + "\n")


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows and the machine they were measured on, as JSON."""
    save({"rows": [asdict(row) for row in rows]}, path)


def finish(rows: Sequence[Row], path: Path | None) -> int:
    """The end of a program: its table on stdout, its rows in `path`; the exit code, 1 for a missed target."""
    print(render(rows))
    if path is not None:
        write(rows, path)
    return int(any(row.passed is False for row in rows))
