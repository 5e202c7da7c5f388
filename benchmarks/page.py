"""docs/benchmarks.md out of benchmarks/results/*.json: one table for each question, with machine and date.

    python benchmarks/page.py

What no file has is said to be not measured. A row whose target is missed says so.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from table import Row, render

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
HEAD = """# Benchmarks
`make bench` measures what a CPU can show, `make gpu-check` what needs a GPU; both write \
`benchmarks/results/*.json`, and this page is made of those files by `python benchmarks/page.py`. Peers run \
in the same invocation and take turns; figures are medians, with the smallest and the largest where they are \
given. Ratios carry over to other machines, seconds do not. A row that misses its target is printed as it is.
"""


class Question(NamedTuple):
    """What is asked, the program that answers, the file of its answer, and how its rows are read there.

    A `file` with a star is several, each taken by itself on a machine and day of its own.
    """

    title: str
    program: str
    file: str
    rows: Callable[[Any], list[Row]]


def _rows(found: Any) -> list[Row]:
    return [Row(**row) for row in found["rows"]]


def _compression(found: Any) -> list[Row]:
    return [
        Row(
            f"a step over {row['rate']}, {row['compression']}",
            found["steps"],
            f"{row['step_ms']} ms, {row['bytes'] / 1e6:.1f} MB",
            "uncompressed",
            f"{row['ratio']:.2f}",
            passed=None,
        )
        for row in found["rows"]
        if row["compression"] != "none"
    ]


QUESTIONS = (
    Question("What a framework costs a step", "framework_cost.py", "framework_cost.json", _rows),
    Question("Loaders alone, without a model", "data_path.py", "data_path.json", _rows),
    Question("Time to 98%, from the start of the program", "time_to_98.py", "time_to_98.json", _rows),
    Question(
        "Saves and recoveries, short", "reliability.py saves recovery", "saves_and_recovery.json", _rows
    ),
    Question("What stops, saves and recoveries cost", "reliability.py --full", "reliability_*.json", _rows),
    Question("Host memory of a resume", "big_resume.py", "big_resume.json", _rows),
    Question("From the command to the first step", "launch_cost.py", "launch_cost.json", _rows),
    Question("Clocks, second launches, signals", "trust_trials.py", "trust_*.json", _rows),
    Question("A long run that is killed again and again", "endurance.py", "endurance.json", _rows),
    Question(
        "A long run that is left alone", "endurance.py --steps 1000000 --kills 0", "long_run.json", _rows
    ),
    Question("A hog on each core", "busy_machine.py", "busy_machine.json", _rows),
    Question("Scripts as they are", "script_trials.py", "scripts.json", _rows),
    Question("Node 0 and rank 0 at 1,024 ranks", "thousand_ranks.py", "thousand_ranks.json", _rows),
    Question(
        "The order of 1,000,000,000 samples",
        "thousand_ranks.py --only order --samples 1000000000",
        "order.json",
        _rows,
    ),
    Question(
        "Compressed gradients on slow networks",
        "gradient_compression.py",
        "gradient_compression.json",
        _compression,
    ),
    Question("One GPU", "gpu_check.py", "gpu.json", _rows),
)


def _measured_on(found: dict[str, Any]) -> str:
    machine = found.get("machine")
    if machine is None:
        return "The machine was not noted."
    gpus = machine.get("gpus") or []
    words = [
        f"{machine['cores']} cores",
        *([machine["processor"]] if "processor" in machine else []),
        *(f"{each}" for each in (gpus if isinstance(gpus, list) else [f"{gpus} GPUs"])),
        f"torch {machine['torch']}",
        f"Python {machine['python']}",
        machine["time"],
    ]
    load = f"; 15 minutes' load was {machine['load']}" if "load" in machine else ""
    return f"{', '.join(words)}{load}."


def page(results: Path) -> str:
    """The whole of docs/benchmarks.md."""
    parts = [HEAD]
    for title, program, file, rows in QUESTIONS:
        parts.append(f"## {title}\n`python benchmarks/{program}`, `benchmarks/results/{file}`.")
        answers = sorted(results.glob(file))
        if not answers:
            parts[-1] += " Not measured.\n"
        for answer in answers:
            found = json.loads(answer.read_text())
            parts[-1] = parts[-1].rstrip("\n") + (f"\n\n`{answer.name}`:" if "*" in file else "")
            parts[-1] += f" {_measured_on(found)}\n\n{render(rows(found))}\n"
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(RESULTS))
    print(f"written: {PAGE.relative_to(ROOT)}", file=sys.stderr)
