"""Build the two pages for users: the live page of the server, and the report. Both are self-contained.

They are assembled from `page/`: one style sheet and one set of parts for both, and uPlot for the curves.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.telemetry.journal import to_json

FOLDER = Path(__file__).parent / "page"
UPLOT = "uplot-1.6.32"


@dataclass(frozen=True)
class Page:
    """HTML, and the Content-Security-Policy that allows only its own style and script."""

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """Return the page that requests only /api/run and /api/history."""
    style = _style()
    script = _script("live.js")
    html = _part("live.html").replace("@STYLE@", style).replace("@SCRIPT@", script)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def report_page(data: Mapping[str, object]) -> bytes:
    """Return the report of finished runs; `data` is what report.js reads."""
    style = _style()
    script = _script("report.js")
    # In a script element, only "</script" and "<!--" have a special meaning, and both need a "<".
    embedded = to_json(dict(data)).replace("<", "\\u003c")
    html = _part("report.html").replace("@STYLE@", style).replace("@SCRIPT@", script)
    # The data come last, because they may contain the text of a placeholder.
    return html.replace("@POLICY@", report_policy()).replace("@DATA@", embedded).encode()


@cache
def report_policy() -> str:
    """Return the Content-Security-Policy of every report."""
    style = _digest(_style())
    script = _digest(_script("report.js"))
    return f"default-src 'none'; style-src '{style}'; script-src '{script}'; img-src data:"


def _style() -> str:
    return _part(f"{UPLOT}.min.css") + _part("style.css")


def _script(page: str) -> str:
    """Return the code of both pages, uPlot with its required license text, and the code of one page."""
    licence = f"/*\n{_part('uplot-LICENSE')}*/\n"
    own = [_part(name) for name in ("charts.js", "parts.js", page)]
    return "".join([_part("basics.js"), licence, _part(f"{UPLOT}.min.js"), *own])


def _part(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
