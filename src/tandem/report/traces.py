"""Merge the profiles of all ranks into one trace for Perfetto or chrome://tracing, on one clock.

Node 0's agent runs `python -m tandem.report.traces JOB` as a separate process, because parsing large traces
would delay its other work. JOB is a JSON file with the parts, the output and the metadata.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.telemetry.journal import write_bytes_atomic

Event = dict[str, Any]
FLOWS_PER_RANK = 2**40
"""Offset per rank for the numbers of arrows between events, which are unique only within one rank's trace."""


def merged(parts: Sequence[Mapping[str, Any]], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return one trace, with one process row for each part.

    A part has `rank`, `node`, `node_name`, `path` (of torch's trace) and `ahead`: the nanoseconds by which
    its clock is ahead of node 0's. Raises OSError, and ValueError for a file that is no trace.
    """
    events: list[Event] = []
    base: int | None = None
    for part in sorted(parts, key=lambda each: int(each["rank"])):
        trace = json.loads(Path(part["path"]).read_text())
        if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
            raise ValueError(f"rank {part['rank']} wrote no trace")
        own_base = int(trace.get("baseTimeNanoseconds", 0))
        base = own_base if base is None else base
        # torch's times are microseconds of the wall clock since the base.
        shift = (own_base - base - int(part["ahead"])) / 1000
        events += _events(part, trace["traceEvents"], shift)
    return {
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base or 0,
        "tandem": dict(metadata),
        "traceEvents": events,
    }


def _events(part: Mapping[str, Any], events: Sequence[Event], shift: float) -> Iterator[Event]:
    rank = int(part["rank"])
    name = f"rank {rank} on node {part['node']} ({part['node_name']})"
    yield _named(rank, 0, "process_name", {"name": name})
    yield _named(rank, 0, "process_sort_index", {"sort_index": rank})
    rows: dict[tuple[Any, Any], int] = {}
    names = {
        (each.get("pid"), each.get("tid")): each.get("args", {}).get("name")
        for each in events
        if each.get("ph") == "M" and each.get("name") == "thread_name"
    }
    for event in events:
        # Rows whose process is not a number are torch's own marks of the recording.
        if event.get("ph") == "M" or not isinstance(event.get("pid"), int) or "ts" not in event:
            continue
        row = (event["pid"], event.get("tid"))
        if row not in rows:
            rows[row] = len(rows) + 1
            yield _named(rank, rows[row], "thread_name", {"name": names.get(row) or f"{row[0]}, {row[1]}"})
        changed = {**event, "pid": rank, "tid": rows[row], "ts": event["ts"] + shift}
        if isinstance(event.get("id"), int):
            changed["id"] = rank * FLOWS_PER_RANK + event["id"]
        yield changed


def _named(rank: int, row: int, what: str, arguments: Mapping[str, Any]) -> Event:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "ts": 0, "args": dict(arguments)}


def main(job: Path) -> None:
    words = json.loads(job.read_text())
    output = Path(words["output"])
    output.parent.mkdir(parents=True, exist_ok=True)
    trace = json.dumps(merged(words["parts"], words["metadata"])).encode()
    write_bytes_atomic(output, trace, is_durable=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
