"""`tandem report`: one HTML file of a finished run, or of several side by side, from what lies in RUN_DIR."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tandem.checkpoint.storage.copies import at_hand, local_folder, make_folder
from tandem.config.address import address
from tandem.errors import ConfigError
from tandem.log import counted
from tandem.report.about import About
from tandem.report.history import History
from tandem.report.pages import report_page
from tandem.telemetry.journal import read_events, read_json, write_bytes_atomic
from tandem.telemetry.meter import ACTIVITIES, PHASES
from tandem.telemetry.metrics import ACTIVITY_SECONDS
from tandem.telemetry.restarts import Restarts

NOT_COMPARED = ("run_dir", "run_name", "resume", "metrics_port", "node_rank", "master")


def write_report(run_dirs: Sequence[Path], output: Path, secrets: Sequence[str] = ()) -> None:
    """Write the report of `run_dirs`, the first one in full if it is alone. Raises ConfigError.

    `secrets`: values that it must not show.
    """
    page = make_report(run_dirs, secrets)
    try:
        if output.parent == local_folder(
            run_dirs[0]
        ):  # not there where the run has never been on this machine
            make_folder(output.parent)
        write_bytes_atomic(output, page)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}; give --output FILE") from error


def make_report(
    run_dirs: Sequence[Path], secrets: Sequence[str] = (), links: Sequence[str] = (), up: str = ""
) -> bytes:
    """The page itself; `links` lead to the page of each run alone, `up` to all. Raises ConfigError."""
    runs = [read_run(run_dir, secrets) for run_dir in run_dirs]
    return report_page({"runs": runs, "made": time.time(), "links": list(links), "up": up})


def read_run(run_dir: Path, secrets: Sequence[str] = ()) -> dict[str, Any]:
    """What report.js reads of one run. Raises ConfigError if `run_dir` holds none."""
    with at_hand(run_dir) as folder:
        return _read_run(address(run_dir), folder, secrets)


def _read_run(run_dir: PurePath, folder: Path, secrets: Sequence[str]) -> dict[str, Any]:
    settings = read_json(folder / "config.json")
    history = History(folder, run_dir / "checkpoints")
    points: list[dict[str, Any]] = list(history.curves()["points"])  # type: ignore[call-overload]
    if not settings and not points:
        raise ConfigError(f"{run_dir} holds no run: it has neither config.json nor metrics.jsonl")
    summary, now = read_json(folder / "summary.json"), history.now()
    name = str(settings.get("run_name") or Path(run_dir).resolve().name)
    ranks, nodes = summary.get("world_size"), summary.get("nodes")
    size = f"{counted(int(ranks), 'rank')} on {counted(int(nodes or 1), 'node')}" if ranks else ""
    restarts = summary.get("restarts", Restarts(read_events(folder)).total)
    events = now["events"]
    assert isinstance(events, list)
    state, reason = str(summary.get("state", "not finished")), str(summary.get("reason") or "")
    noted = About(folder, secrets)
    about = noted.read()
    if summary.get("optimizer"):  # what took the steps, whatever the settings said
        parts = [summary["optimizer"], f"lr {summary.get('lr')}", summary.get("schedule")]
        about["optimizer"] = ", ".join(str(part) for part in parts if part)
    values = {str(row["name"]): row["value"] for row in about["settings"]}
    return {
        "name": name,
        "state": state,
        "reason": noted.hide(reason) if state == "failed" else "",
        "where": f"{settings.get('task', '')}: {size}" if size else "",
        "cards": [
            ["steps", summary.get("global_step", points[-1]["step"] if points else None)],
            ["loss", summary.get("loss")],
            *([score, value] for score, value in dict(summary.get("eval") or {}).items() if score != "loss"),
            ["samples/s", summary.get("samples_per_second")],
            ["wall time", summary.get("wall_seconds")],
            ["restarts", restarts],
        ],
        "settings": {key: value for key, value in values.items() if key not in NOT_COMPARED},
        "about": about,
        "log": About(local_folder(run_dir), secrets).log(reason) if state == "failed" else None,
        "points": points,
        "phases": _phases(points),
        "activities": _activities(folder / "metrics.prom"),
        "checkpoints": now["checkpoints"],
        "events": noted.hidden(events),
        "began": events[-1].get("time") if events else None,
        "ended": events[0].get("time") if events else None,
    }


def _phases(points: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by phase over all intervals that are known."""
    known = [point["phases"] for point in points if isinstance(point.get("phases"), dict)]
    return {phase: sum(float(each.get(phase, 0.0)) for each in known) for phase in PHASES}


def _activities(page: Path) -> list[list[object]]:
    """[activity, seconds] of the last launch, from the last page of metrics."""
    try:
        families = list(text_string_to_metric_families(page.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return []
    seconds = {
        sample.labels.get("activity"): sample.value
        for family in families
        for sample in family.samples
        if sample.name in ACTIVITY_SECONDS.wire_names
    }
    return [[activity, seconds[activity]] for activity in ACTIVITIES if seconds.get(activity)]
