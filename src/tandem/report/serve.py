"""`tandem page`: reports of finished or running runs over HTTP, created again for each request."""

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from tandem import layout
from tandem.errors import ConfigError
from tandem.report.access import OPEN_PATHS, Access
from tandem.report.pages import report_policy
from tandem.report.report import make_report
from tandem.report.runs import find_runs
from tandem.report.web import bind
from tandem.timeouts import SUPERVISE_SECONDS

MOST = 20
"""Maximum number of runs on a page; of a directory with more, the newest."""
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
        """Serve until `should_stop()` returns True."""
        # `handle_request` returns after this time without a client, so that a stop is noticed.
        self._http.timeout = SUPERVISE_SECONDS
        try:
            while not should_stop():
                self._http.handle_request()
        finally:
            self._http.server_close()
