"""One line of a benchmark's outcome, and how many lines become a table and a JSON file."""

import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """`outcome` of `trials`, that of a `control` in the same run, and whether the target is met."""

    name: str
    trials: int
    outcome: str
    control: str = ""
    ratio: str = ""
    target: str = ""
    passed: bool = True


def render(rows: Sequence[Row]) -> str:
    """A Markdown table."""
    lines = [
        "| what | trials | outcome | control | ratio | target | met |",
        "|---|---:|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.name} | {row.trials} | {row.outcome} | {row.control} | {row.ratio} | {row.target} "
        f"| {'yes' if row.passed else '**no**'} |"
        for row in rows
    ]
    return "\n".join(lines)


def write(rows: Sequence[Row], path: Path) -> None:
    """The rows and the machine they were measured on, as JSON."""
    machine = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": torch.get_num_threads(),
        "gpus": torch.cuda.device_count(),
        "time": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
