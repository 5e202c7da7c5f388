"""`tandem runs --goodput`: show where the wall time of runs went, and how much each cause has cost."""

from collections.abc import Sequence
from pathlib import Path

from tandem import layout
from tandem.bounded_reader import RunFiles
from tandem.log import printable
from tandem.report.runs import RunRow
from tandem.run.directory import RunDir
from tandem.telemetry.ledger import Ledger, account, periods_in
from tandem.text import format_duration

MEANING = {
    "steps": "steps that count",
    "redone": "steps repeated or cut short",
    "data": "steps waiting for data",
    "stragglers": "steps waiting for a slow rank",
    "evaluation": "evaluations",
    "save": "saves that block training",
    "start": "starts: imports, preparing data",
    "rendezvous": "nodes waiting for each other",
    "resume": "loading states, slow first steps",
    "end": "ending, waiting for the last scrape",
    "away": "no launch was running",
}
"""The label of each of PARTS, for people."""


def time_of(ledger: Ledger) -> dict[str, object]:
    """Return both tables of the page: [label, seconds] for each part, and [cause, times, seconds]."""
    return {
        "parts": [[MEANING[part], seconds] for part, seconds in ledger.parts.items() if seconds],
        "causes": [[cause, *cost] for cause, cost in ledger.causes.items()],
    }


def ledger_of(files: RunFiles) -> Ledger:
    """Return the ledger of a run's wall time; empty if it has no goodput.jsonl."""
    return account(periods_in(files.lines(layout.GOODPUT)))


def table(rows: Sequence[RunRow], folder: Path) -> str:
    """Format aligned lines, run by run."""
    if not rows:
        return f"no runs in {printable(str(folder))}"
    return "\n\n".join("\n".join(_lines(row.path)) for row in rows)


def as_json(rows: Sequence[RunRow], folder: Path) -> dict[str, object]:
    """Return what `tandem runs --goodput --json` prints."""
    return {"directory": str(folder), "runs": [_json(row.path) for row in rows]}


def _json(path: Path) -> dict[str, object]:
    ledger = ledger_of(RunDir(path).files())
    return {
        "path": str(path),
        "wall_seconds": round(ledger.wall, 3),
        "seconds": {part: round(seconds, 3) for part, seconds in ledger.parts.items()},
        "causes": {
            cause: {"times": cost.times, "seconds": round(cost.seconds, 3)}
            for cause, cost in ledger.causes.items()
        },
    }


def _lines(path: Path) -> list[str]:
    ledger = ledger_of(RunDir(path).files())
    name = printable(str(path))
    if not ledger.wall:
        return [f"{name}: no goodput.jsonl; an older version of tandem ran it, or it has not started"]
    share = ledger.parts["steps"] / ledger.wall
    lines = [f"{name}: {format_duration(ledger.wall)}, of which {share:.1%} are steps that count"]
    for part, seconds in ledger.parts.items():
        if seconds:
            lines.append(_line(MEANING[part], seconds, ledger.wall))
    if ledger.causes:
        lines.append("cost of each cause, with the restart that follows")
    for cause, cost in ledger.causes.items():
        times = "once" if cost.times == 1 else f"{cost.times} times"
        lines.append(_line(f"{cause}, {times}", cost.seconds, ledger.wall))
    return lines


def _line(what: str, seconds: float, wall: float) -> str:
    return f"  {what:38} {format_duration(seconds):>14}  {seconds / wall:6.1%}"
