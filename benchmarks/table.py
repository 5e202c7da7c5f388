"""One line of a benchmark's outcome, and how many lines become a table and a JSON file."""

import json
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """`outcome` of `trials`, that of a `control` in the same run, and whether the target is met.

    `passed` None: there is no target, or it was not measured.
    """

    name: str
    trials: int
    outcome: str
    control: str = ""
    ratio: str = ""
    target: str = ""
    passed: bool | None = True


MET = {True: "yes", False: "**no**", None: ""}


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [
        "| what | trials | outcome | control | ratio | target | met |",
        "|---|---:|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.trials or ''} | {row.outcome.replace('|', '/')} | {row.control} | {row.ratio} "
        f"| {row.target} | {MET[row.passed]} |"
        for row in rows
    ]
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """What the rows were measured on, and when."""
    import torch

    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "load": round(os.getloadavg()[2], 1),
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows and the machine they were measured on, as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"machine": machine(), "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def finish(rows: Sequence[Row], path: Path | None) -> int:
    """The end of a program: its table on stdout, its rows in `path`; the exit code, 1 for a missed target."""
    print(render(rows))
    if path is not None:
        write(rows, path)
    return int(any(row.passed is False for row in rows))
