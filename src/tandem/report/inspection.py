"""Format a run's answers to `tandem stacks`, `profile` and `memory`, and serve them over HTTP."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from tandem.errors import TandemError
from tandem.telemetry.journal import to_json
from tandem.telemetry.stacks import is_helper

Row = Mapping[str, Any]


def stacks_text(result: Mapping[str, Any], all_threads: bool = False) -> str:
    """Return the stacks of all ranks; ranks with equal stacks share a block. Innermost frames come first."""
    blocks: dict[str, list[Row]] = {}
    for row in result["answers"]:
        blocks.setdefault(_body(row, all_threads), []).append(row)
    return "\n\n".join("\n".join([*map(_position, rows), body]) for body, rows in blocks.items())


def profile_text(result: Mapping[str, Any]) -> str:
    """Return the path of the trace, how far its clocks may differ, and one line per rank without a trace."""
    lines = []
    if result.get("file"):
        rows = [row for row in result["answers"] if not row.get("error")]
        lines.append(
            f"steps {result['first']:,} to {result['last']:,} of {len(rows)} ranks: {result['file']}"
        )
        skew = result.get("clock_uncertainty_us")
        if skew is None:
            lines.append("the clock of a node could not be compared; its rows may be shifted")
        elif skew:
            lines.append(f"clocks of the nodes agree within {skew / 1000:.2f} ms")
    for row in result["answers"]:
        if row.get("error"):
            who = f"rank {row['rank']}" if row.get("rank") is not None else f"node {row['node']}"
            lines.append(f"no profile of {who}: {row['error']}")
    return "\n".join(lines)


def memory_text(result: Mapping[str, Any]) -> str:
    """Return a block for each rank: sizes, its largest tensors, and the lines that allocated most."""
    return "\n\n".join("\n".join([_position(row), *_memory(row)]) for row in result["answers"])


def _memory(row: Row) -> list[str]:
    if row.get("error"):
        return [f"  {row['error']}"]
    lines = [f"  resident memory: {row['resident_bytes']:,} bytes"]
    for gpu in row.get("gpus") or ():
        sizes = ", ".join(f"{name} {gpu[name]:,}" for name in ("allocated", "reserved", "peak"))
        lines.append(f"  GPU {gpu['gpu']}, in bytes: {sizes}")
    if row.get("snapshot"):
        lines.append(f"  snapshot for https://pytorch.org/memory_viz: {row.get('snapshot')}")
    if row.get("tensors"):
        lines.append("  largest tensors, in bytes:")
        for each in row["tensors"]:
            what = f"{each['count']} x {each['type']} {each['shape']} on {each['device']}"
            lines.append(f"    {each['bytes']:>14,}  {what}")
    if row.get("lines"):
        lines.append(f"  allocated by Python in {row['watched_seconds']:g} s and still in use, in bytes:")
        lines += [f"    {each['bytes']:>14,}  {each['place']}" for each in row["lines"]]
    return lines


def _position(row: Row) -> str:
    """Return where a rank is, by its last heartbeat: "rank 1 on node 0 (a): step 12, backward for 0.3 s"."""
    if row.get("rank") is None:
        return f"node {row['node']}"
    name = f" ({row['node_name']})" if row.get("node_name") else ""
    text = f"rank {row['rank']} on node {row['node']}{name}"
    if row.get("step") is None:
        return f"{text}: no heartbeat yet"
    waiting = ", waiting for other ranks" if row.get("waiting") else ""
    return f"{text}: step {row['step']:,}, {row['phase']} for {row['seconds']:g} s{waiting}"


def _body(row: Row, all_threads: bool) -> str:
    if row.get("error"):
        return f"  {row['error']}"
    threads: Sequence[Row] = row.get("threads") or []
    shown = [each for each in threads if all_threads or not is_helper(each)]
    lines: list[str] = []
    for thread in shown if all_threads else shown[:1]:
        lines.append(f"  {thread['thread']}, most recent call first:")
        lines += [f"    {file}:{line} in {function}" for file, line, function in thread["frames"]]
    if row.get("in_c"):
        lines.append("  The rank runs no Python: its innermost line has called native code.")
    if row.get("note"):
        lines.append(f"  {row['note']}")
    if not all_threads and len(shown) > 1:
        lines.append(f"  threads that are not shown: {len(shown) - 1}; --all-threads shows them")
    return "\n".join(lines) or "  no Python threads"


# Answer requests over HTTP, for readers with the token, never from another site.

PREFIX = "/api/inspect/"
TRACE = "/api/trace"
"""The newest trace that a request here has written."""
HEADER = "X-Tandem"
"""A page of another site cannot send this header without a preflight request, which the server refuses."""
TEXT = "text/plain; charset=utf-8"
Ask = Callable[[str, Mapping[str, float]], dict[str, Any]]
Response = tuple[int, str, bytes]
TEXTS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "stacks": stacks_text,
    "profile": profile_text,
    "memory": memory_text,
}


class InspectionPaths:
    """Answers POST requests below PREFIX with {"text": ...}; `ask` is None until an agent sets it."""

    def __init__(self, has_token: bool) -> None:
        self.ask: Ask | None = None
        self._has_token = has_token
        self._trace: Path | None = None

    @property
    def is_open(self) -> bool:
        """Whether a reader with the token gets answers."""
        return self.ask is not None and self._has_token

    def post(self, target: str, header: str | None) -> Response:
        """Return the response to a request whose reader has the token; `target` is path and query."""
        path, _, query = target.partition("?")
        action = path.removeprefix(PREFIX)
        if action not in TEXTS or not path.startswith(PREFIX):
            return 405, TEXT, b"only GET and HEAD are allowed\n"
        if not self._has_token:
            return 403, TEXT, b"this needs a token: start the run with --metrics-token-file\n"
        if header is None:
            return 403, TEXT, f"the header {HEADER} is missing\n".encode()
        if self.ask is None:
            return 503, TEXT, b"no agent answers\n"
        try:
            result = self.ask(action, {name: float(value) for name, value in parse_qsl(query)})
        except (TandemError, ValueError) as error:
            return 409, TEXT, f"{error}\n".encode()
        except Exception as error:  # the store is lost, or a file cannot be written
            return 500, TEXT, f"the request failed: {type(error).__name__}\n".encode()
        if result.get("file"):
            self._trace = Path(result["file"])
        has_trace = action == "profile" and bool(result.get("file"))
        words = {"text": TEXTS[action](result), "trace": TRACE[1:] if has_trace else None}
        return 200, "application/json", (to_json(words) + "\n").encode()

    def trace(self) -> Response:
        try:
            if self._trace is not None and self._has_token:
                return 200, "application/json", self._trace.read_bytes()
        except OSError:  # it was removed
            pass
        return 404, TEXT, b"no trace has been recorded from this page\n"
