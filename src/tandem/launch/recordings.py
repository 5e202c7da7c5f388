"""Write the ranks' recordings to the run directory: their profiles as one trace, and memory snapshots."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem import layout
from tandem.errors import TandemError
from tandem.launch.clock_offsets import Offset
from tandem.process import safe_path
from tandem.telemetry.inspection import Answer


def trace_parts(
    answers: Sequence[tuple[int, Answer]],
    names: Mapping[int, str],
    offsets: Mapping[int, Offset | None],
    folder: Path,
) -> list[dict[str, Any]]:
    """Return a row for each rank with a trace in `folder`, as `report.traces` reads it.

    `answers`: (node, answer). `names`: {rank: name of its node}. `offsets`: {node: its clock}.
    """
    parts = []
    for node, answer in answers:
        if not answer.file:
            continue
        offset = offsets.get(node) if node in offsets else Offset(0, 0)
        part = {"rank": answer.rank, "node": node, "node_name": names.get(answer.rank, ""), **answer.facts}
        part["clock_ahead_us"] = None if offset is None else offset.ahead / 1000
        part["clock_uncertainty_us"] = None if offset is None else offset.uncertainty / 1000
        part["ahead"] = 0 if offset is None else offset.ahead
        part["path"] = str(folder / answer.file)
        parts.append(part)
    return parts


def write_merged(run_folder: Path, parts: Sequence[Mapping[str, Any]], job: Path) -> dict[str, Any]:
    """Merge the traces in a separate process, and remove them; return facts about the merged file.

    `job` is a path for the description of the merge. Raises TandemError if it fails.
    """
    if not parts:
        return {"file": None}
    first = min(int(part["after"]) for part in parts) + 1
    last = max(int(part["after"]) + int(part["steps"]) for part in parts)
    output = run_folder / layout.PROFILE / layout.merged_profile(first, last)
    shown = [{name: part[name] for name in part if name not in ("path", "ahead")} for part in parts]
    words = {"parts": parts, "output": str(output), "metadata": {"run": run_folder.name, "ranks": shown}}
    job.write_text(json.dumps(words))
    command = [sys.executable, "-m", "tandem.report.traces", str(job)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, env=safe_path(os.environ)
    )
    for path in (job, *(Path(part["path"]) for part in parts)):
        path.unlink(missing_ok=True)
    if done.returncode != 0:
        last_line = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise TandemError(f"the traces could not be merged: {last_line}")
    known = [part["clock_uncertainty_us"] for part in parts]
    skew = None if None in known else max(known)
    return {"file": str(output), "first": first, "last": last, "clock_uncertainty_us": skew}


def keep_snapshots(answers: Sequence[Answer], folder: Path, run_folder: Path) -> None:
    """Move the allocator snapshots from `folder` to the run directory, and note their path in the answers."""
    for answer in answers:
        if answer.file:
            target = run_folder / layout.PROFILE / layout.memory_snapshot(answer.rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / answer.file, target)
            answer.facts["snapshot"] = str(target)
