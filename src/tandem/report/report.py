"""`tandem report`: one HTML file about one finished run, or several side by side, from their RUN_DIRs."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tandem import layout
from tandem.checkpoint.decision import LINKED, is_linked
from tandem.errors import ConfigError, TandemError
from tandem.log import pluralize, printable
from tandem.paths import check_replaceable
from tandem.report.about import About
from tandem.report.goodput import ledger_of, time_of
from tandem.report.history import History
from tandem.report.pages import report_page, report_policy
from tandem.report.runs import find_runs
from tandem.report.web import OPEN_PATHS, Access, bind
from tandem.run.directory import RunDir
from tandem.telemetry.journal import Restarts, write_bytes_atomic
from tandem.telemetry.meter import PHASES
from tandem.telemetry.verdict import measured, verdict
from tandem.timeouts import SUPERVISE_SECONDS

LONGEST = 400
LONGEST_NAME = 120
"""Maximum number of characters for a message about a problem, and for a name."""
# Where and how a run was started differs between most runs, but says nothing about its training.
NOT_COMPARED = ("run_dir", "resume", "metrics", "node_rank", "master")


def write_report(run_dirs: Sequence[Path], output: Path, secrets: Sequence[str] = ()) -> list[str]:
    """Write the report of `run_dirs`, with full details if it is only one; return a message per problem.

    `secrets`: values that must not be shown. Raises ConfigError if there is no run, or `output` cannot be
    written.
    """
    problems: list[str] = []
    page = make_report(run_dirs, secrets, problems=problems)
    try:
        check_replaceable(output)
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
        with run.local_copy() as copied:
            return _read_run(run, copied, secrets)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be read: {error.strerror or error}") from error


def _read_run(run: RunDir, copied: RunDir, secrets: Sequence[str]) -> dict[str, Any]:
    """`copied`: the same run with local copies of its files, except logs."""
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
    size = f"{pluralize(ranks, 'rank')} on {pluralize(nodes or 1, 'node')}" if ranks else ""
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
    seen = measured(files.text(layout.METRICS_PAGE), settings)
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
        "verdict": verdict(seen),
        "phases": _phases(points),
        "activities": [[activity, seconds] for activity, seconds in seen.activities.items() if seconds],
        "time": time_of(ledger_of(files)),
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


# `tandem page`: reports of finished or running runs over HTTP, created again for each request.

MOST = 20
"""Maximum number of runs on a page; of a directory with more, it shows the newest."""
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"


def runs_in(paths: Sequence[Path]) -> list[Path]:
    """Return the given run directories, and those in given directories of runs. Raises ConfigError."""
    found = []
    for path in paths:
        if "://" in str(path) or any(os.path.lexists(path / name) for name in layout.COPIED):
            found.append(path)
            continue
        inside = [row.path for row in find_runs(path)]
        if not inside:
            raise ConfigError(f"{path} is not a run and contains none; give RUN_DIR, or a directory of runs")
        found += inside
    return found[:MOST]


class ReportServer:
    """Serves the report of one run at /; for several, their comparison, and each run at /1, /2, ..."""

    policy = report_policy()

    def __init__(
        self, run_dirs: Sequence[Path], host: str, port: int, access: Access, secrets: Sequence[str] = ()
    ) -> None:
        """Raises OSError."""
        self._run_dirs = run_dirs
        self.access = access
        self._secrets = secrets
        self._http = bind(host, port, self, "the page")
        self.url = self._http.url

    def answer(self, path: str, accept: str, allowed: bool = True) -> tuple[int, str, bytes]:
        """Return HTTP status, content type and body for a path; `allowed`: the reader has the token."""
        if path in OPEN_PATHS:
            return 200, TEXT, b"good\n"
        if not allowed:
            return 401, TEXT, b"token required, as a bearer token or password\n"
        count = len(self._run_dirs)
        known = ["/", *(f"/{number}" for number in range(1, count + 1) if count > 1)]
        if path not in known:
            return 404, TEXT, f"not found; available: {', '.join(known)}\n".encode()
        number = int(re.sub(r"\D", "", path) or 0)
        chosen = self._run_dirs[number - 1 : number] if number else self._run_dirs
        links, up = (known[1:], "") if not number else ([], "/")
        try:
            return 200, HTML, make_report(chosen, self._secrets, links, up)
        except ConfigError as error:  # it was removed, or cannot be read
            return 404, TEXT, f"{error}\n".encode(errors="replace")

    def note_read(self, path: str, moment: float, is_sent: bool = True, is_scraper: bool = False) -> None:
        """Do nothing, because the server does not wait for readers."""

    def problems(self) -> list[str]:
        """Return a message for each run and each file that cannot be read."""
        problems: list[str] = []
        with suppress(ConfigError):  # no run can be read: each is a problem
            make_report(self._run_dirs, self._secrets, problems=problems)
        return problems

    def serve(self, should_stop: Callable[[], object]) -> None:
        # Without a client, `handle_request` returns after this time, so that a stop is noticed.
        self._http.timeout = SUPERVISE_SECONDS
        try:
            while not should_stop():
                self._http.handle_request()
        finally:
            self._http.server_close()
