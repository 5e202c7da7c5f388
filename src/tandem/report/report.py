"""`tandem report`: one HTML file about one finished run, or several side by side, from their RUN_DIRs."""

import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tandem import layout
from tandem.checkpoint.locate import LINKED, is_linked
from tandem.errors import ConfigError, TandemError
from tandem.log import counted, printable
from tandem.report.about import About
from tandem.report.history import History
from tandem.report.pages import report_page
from tandem.run.directory import RunDir
from tandem.telemetry.journal import write_bytes_atomic
from tandem.telemetry.meter import ACTIVITIES, PHASES
from tandem.telemetry.metrics import ACTIVITY_SECONDS
from tandem.telemetry.restarts import Restarts

_ACTIVITY = re.compile(
    rf"""^(?:{"|".join(ACTIVITY_SECONDS.wire_names)})\{{[^}}]*\bactivity="(\w+)"[^}}]*\}} (\S+)$""", re.M
)
LONGEST = 400
LONGEST_NAME = 120
"""Maximum number of characters for a message about a problem, and for a name."""
# Where and how a run was started differs between most runs, and says nothing about its training.
NOT_COMPARED = ("run_dir", "resume", "metrics", "node_rank", "master")


def write_report(run_dirs: Sequence[Path], output: Path, secrets: Sequence[str] = ()) -> list[str]:
    """Write the report of `run_dirs`, with full details if it is only one; return a message per problem.

    `secrets`: values that must not be shown. Raises ConfigError if there is no run, or `output` cannot be
    written.
    """
    problems: list[str] = []
    page = make_report(run_dirs, secrets, problems=problems)
    try:
        run = RunDir(run_dirs[0])
        if output.parent == run.folder:  # missing if the run has never been on this machine
            run.make_folder()
        write_bytes_atomic(output, page)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}; give --output FILE") from error
    return problems


def make_report(
    run_dirs: Sequence[Path],
    secrets: Sequence[str] = (),
    links: Sequence[str] = (),
    up: str = "",
    problems: list[str] | None = None,
) -> bytes:
    """Return the page; a run that cannot be read is left out and adds a message to `problems`.

    `links` lead to the pages of single runs, `up` to the page of all. Raises ConfigError if no run can be
    read.
    """
    problems = [] if problems is None else problems
    runs: list[dict[str, Any]] = []
    shown_links: list[str] = []
    for run_dir, link in zip_longest(run_dirs, links[: len(run_dirs)]):
        try:
            runs.append(read_run(run_dir, secrets))
        except TandemError as error:
            problems.append(printable(str(error), LONGEST))
            continue
        shown_links += [link] if link else []
        problems += [printable(f"{run_dir}: {each}", LONGEST) for each in runs[-1]["problems"]]
    if not runs:
        raise ConfigError("; ".join(problems))
    page = {"runs": runs, "made": time.time(), "links": shown_links, "up": up, "problems": problems}
    return report_page(page)


def read_run(run_dir: Path, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """Return what report.js reads of one run. Raises ConfigError if `run_dir` is not a run."""
    try:
        run = RunDir(run_dir)
        with run.at_hand() as copied:
            return _read_run(run, copied, secrets)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be read: {error.strerror or error}") from error


def _read_run(run: RunDir, copied: RunDir, secrets: Sequence[str]) -> dict[str, Any]:
    """`copied`: the same with its files at hand; logs are not copied."""
    files = copied.files()
    settings = files.read(layout.CONFIG)
    history = History(copied, files)
    linked = is_linked(run.where)
    points: list[dict[str, Any]] = list(history.curves()["points"])  # type: ignore[call-overload]
    if not settings and not points:
        why = "; ".join(files.problems) or "it has neither config.json nor metrics.jsonl"
        raise ConfigError(f"{run.where} is not a run: {why}")
    summary = files.read(layout.SUMMARY)
    now = history.now()
    noted = About(copied.folder, secrets)
    about = noted.read(files)
    name = printable(noted.hide(Path(run.where).resolve().name), LONGEST_NAME)
    ranks = summary.get("world_size")
    nodes = summary.get("nodes")
    size = f"{counted(ranks, 'rank')} on {counted(nodes or 1, 'node')}" if ranks else ""
    starts = Restarts(files.events())
    restarts = summary.get("restarts")
    stops = summary.get("planned_stops")
    events = now["events"]
    assert isinstance(events, list)
    state = printable(summary.get("state") or "not finished", LONGEST_NAME)
    reason = summary.get("reason") or ""
    if summary.get("optimizer"):  # the optimizer that was used, whatever the settings say
        parts = [summary["optimizer"], f"lr {summary.get('lr')}", summary.get("schedule")]
        about["optimizer"] = ", ".join(str(part) for part in parts if part)
    values = {str(row["name"]): row["value"] for row in about["settings"]}
    return {
        "name": name,
        "state": state,
        "reason": noted.hide(reason) if state == "failed" else "",
        "where": noted.hide(f"{settings.get('task') or ''}: {size}") if size else "",
        "cards": [
            ["steps", summary.get("global_step", points[-1]["step"] if points else None)],
            ["loss", summary.get("loss")],
            *([score, value] for score, value in (summary.get("eval") or {}).items() if score != "loss"),
            ["samples/s", summary.get("samples_per_second")],
            ["wall time", summary.get("wall_seconds")],
            # A run that has not ended has no summary, so its events are counted.
            ["restarts", starts.total if restarts is None else restarts],
            ["planned stops", starts.planned_stops if stops is None else stops],
        ],
        "settings": {key: value for key, value in values.items() if key not in NOT_COMPARED},
        "about": about,
        "log": About(run.folder, secrets).log(reason) if state == "failed" else None,
        "points": points,
        "phases": _phases(points),
        "activities": _activities(files.text(layout.METRICS_PAGE)),
        "checkpoints": [] if linked else now["checkpoints"],
        "events": noted.hidden(events),
        # The newest event comes first.
        "began": events[-1].get("time") if events else None,
        "ended": events[0].get("time") if events else None,
        "problems": list(dict.fromkeys([*files.problems, *([LINKED] if linked else [])])),
    }


def _phases(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return seconds by phase over all known intervals."""
    known = [point["phases"] for point in points if isinstance(point.get("phases"), dict)]
    return {phase: sum(each.get(phase) or 0.0 for each in known) for phase in PHASES}


def _activities(page: str) -> list[list[object]]:
    """Return [activity, seconds] of the last launch, from the last metrics page."""
    seconds: dict[str, float] = {}
    for activity, value in _ACTIVITY.findall(page):
        with suppress(ValueError):
            seconds[activity] = float(value)
    return [[activity, seconds[activity]] for activity in ACTIVITIES if seconds.get(activity)]
