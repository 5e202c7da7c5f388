"""Get what ranks do not answer themselves: one trace of their profiles, memory snapshots, stacks from py-spy.

A merged trace needs each node's clock offset from node 0, measured as in NTP: node 0 asks through the agents'
store, the other node answers with its time, and that time counts as taken halfway between question and
arrival. The store is on node 0, so a round takes one trip to the other node and back.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from tandem import layout
from tandem.errors import TandemError
from tandem.process import safe_path
from tandem.telemetry.inspection import Answer
from tandem.timeouts import NATIVE_SECONDS

ROUNDS = 8
"""Only the quickest round counts: a busy machine delays some."""
FIRST_SECONDS = 5.0
"""Limit for the first answer: the other node checks for its request five times a second."""


class Offset(NamedTuple):
    """A clock's offset from node 0's (ahead is positive) and its uncertainty, in nanoseconds."""

    ahead: int
    uncertainty: int


def measure_clock(store: Any, prefix: str, clock: Callable[[], int] = time.time_ns) -> Offset | None:
    """Measure one node's clock from node 0; `prefix` is the store prefix of the request and the node.

    Returns None if the node does not answer.
    """
    best: Offset | None = None
    try:
        for number in range(ROUNDS):
            asked = clock()
            store.set(f"{prefix}/asked/{number}", "")
            key = f"{prefix}/answer/{number}"
            store.wait([key], timedelta(seconds=FIRST_SECONDS))
            theirs = int(store.get(key))
            now = clock()
            found = Offset(theirs - (asked + now) // 2, (now - asked) // 2)
            best = found if best is None or found.uncertainty < best.uncertainty else best
            store.delete_key(key)
    except (RuntimeError, ValueError):
        return best
    # An offset below the uncertainty counts as zero: nodes on one machine share a clock.
    return Offset(0, best.uncertainty) if best and abs(best.ahead) <= best.uncertainty else best


def answer_clock(store: Any, prefix: str, clock: Callable[[], int] = time.time_ns) -> None:
    """Answer node 0's rounds. Raises RuntimeError if node 0 sends none."""
    for number in range(ROUNDS):
        key = f"{prefix}/asked/{number}"
        store.wait([key], timedelta(seconds=FIRST_SECONDS))
        store.set(f"{prefix}/answer/{number}", str(clock()))
        store.delete_key(key)


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
    """Move the allocator snapshots from `folder` to the run directory, and add their paths to the answers."""
    for answer in answers:
        if answer.file:
            target = run_folder / layout.PROFILE / layout.memory_snapshot(answer.rank)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder / answer.file, target)
            answer.facts["snapshot"] = str(target)


MISSING = "no native frames: py-spy is not installed on this node (pip install py-spy)"


class NativeStacks:
    """Runs py-spy, if it is installed, on processes {rank: pid} of this node; `folder` is for its output.

    py-spy also reads native frames, from outside the process. It stops a rank for about a second while it
    reads the stacks, because torch has many symbols.
    """

    def __init__(self, pids: dict[int, int], folder: Path) -> None:
        beside = str(Path(sys.executable).parent)  # a virtual environment need not be in PATH
        self._program = shutil.which("py-spy") or shutil.which("py-spy", path=beside)
        self._folder = folder
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._deadline = time.monotonic() + NATIVE_SECONDS
        for rank, pid in pids.items() if self._program else ():
            command = [str(self._program), "dump", "--native", "--json", "--pid", str(pid)]
            with self._output(rank).open("wb") as output, suppress(OSError):
                self._running[rank] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
                )

    def _output(self, rank: int) -> Path:
        return self._folder / f"native-{rank}"

    def is_done(self) -> bool:
        """Return True once every py-spy has ended; kill those that take too long."""
        if time.monotonic() > self._deadline:
            for process in self._running.values():
                process.kill()
        return all(process.poll() is not None for process in self._running.values())

    def of_rank(self, rank: int) -> dict[str, Any]:
        """Return what py-spy adds to a rank's answer: its threads, or why they are missing."""
        if not self._program:
            return {"note": MISSING}
        text = ""
        with suppress(OSError):
            text = self._output(rank).read_text(errors="replace")
            self._output(rank).unlink()
        try:
            return {"threads": _threads(json.loads(text))}
        except (ValueError, TypeError, KeyError):
            last = (text.strip().splitlines() or ["it wrote nothing"])[-1]
            return {"note": f"no native frames: py-spy: {last[:200]}"}


def _threads(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = [
        {
            "thread": each["thread_name"] or f"thread {each['os_thread_id']}",
            "frames": [(frame["filename"], frame["line"], frame["name"]) for frame in each["frames"]],
        }
        for each in found
    ]
    return sorted(rows, key=lambda row: row["thread"] != "MainThread")
