"""The two pages a person opens: live, from the server, and the report, a file. Both are self-contained.

They are put together from `page/`: one style sheet and one set of charts for both.
"""

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tandem.telemetry.journal import to_json

FOLDER = Path(__file__).parent / "page"


@dataclass(frozen=True)
class Page:
    """HTML, and the Content-Security-Policy that lets only its own style and script run."""

    html: bytes
    policy: str


@cache
def live_page() -> Page:
    """The page that asks /api/run and /api/history, and nobody else."""
    style, script = _part("style.css"), _part("charts.js") + _part("live.js")
    html = _part("live.html").replace("@STYLE@", style).replace("@SCRIPT@", script)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Page(html.encode(), policy)


def report_page(data: Mapping[str, object]) -> bytes:
    """The report of finished runs; `data` is what report.js reads."""
    style, script = _part("style.css"), _part("charts.js") + _part("report.js")
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    )
    # In a script element only "</script" and "<!--" end or change the text, and both need a "<".
    embedded = to_json(dict(data)).replace("<", "\\u003c")
    html = _part("report.html").replace("@STYLE@", style).replace("@SCRIPT@", script)
    return html.replace("@POLICY@", policy).replace("@DATA@", embedded).encode()


def _part(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
