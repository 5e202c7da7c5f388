"""Draw docs/pictures/dp-*.svg from results/dp_vs_ddp.json: python benchmarks/dp_vs_ddp_pictures.py

The images are plain SVG without fonts or scripts; colors follow the reader's light or dark mode.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PICTURES = HERE.parent / "docs" / "pictures"
STYLE = """
text { font: 13px sans-serif; fill: #24292f } .small { font-size: 11px } .bold { font-weight: bold }
.one { stroke: #cf5b22; fill: #cf5b22 } .two { stroke: #1f77b4; fill: #1f77b4 } .wait { fill: #9aa4ae }
.line { fill: none; stroke-width: 2 } .axis { stroke: #8c959f; stroke-width: 1 } .box { fill: none }
.on { fill: #ffffff; stroke: none }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .one { stroke: #f0894f; fill: #f0894f } .two { stroke: #58a6ff; fill: #58a6ff }
  .wait { fill: #5b646e } .axis { stroke: #6e7681 } .on { fill: #0d1117 }
}
"""


def text(x: float, y: float, words: str, anchor: str = "start", kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" class="{kind}">{words}</text>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str = "axis", more: str = "") -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}" {more}/>'


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def path(points: Sequence[tuple[float, float]], kind: str) -> str:
    return f'<polyline points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}" class="line {kind}"/>'


def save(name: str, title: str, width: int, height: int, parts: Sequence[str]) -> None:
    arrows = "".join(
        f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" class="{kind}"/></marker>'
        for kind in ("one", "two")
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
    )
    whole = [head, f"<title>{title}</title><style>{STYLE}</style><defs>{arrows}</defs>", *parts, "</svg>"]
    (PICTURES / name).write_text("\n".join(whole) + "\n")


def exchange() -> None:
    """Draw which devices send to which in a step, for four devices."""
    parts = []
    for left, title, kind in (
        (0, "DataParallel: all by way of the first", "one"),
        (330, "DDP: a ring", "two"),
    ):
        parts.append(text(left + 150, 20, title, "middle", "bold"))
        places = [(left + 150, 70), (left + 240, 150), (left + 150, 230), (left + 60, 150)]
        pairs = [(0, 1), (0, 2), (0, 3)] if kind == "one" else [(0, 1), (1, 2), (2, 3), (3, 0)]
        both = f'marker-start="url(#{kind})"' if kind == "one" else ""
        for a, b in pairs:
            (ax, ay), (bx, by) = places[a], places[b]
            length, gap = math.dist(places[a], places[b]), 24
            dx, dy = (bx - ax) / length * gap, (by - ay) / length * gap
            more = f'stroke-width="2" {both} marker-end="url(#{kind})"'
            parts.append(line(ax + dx, ay + dy, bx - dx, by - dy, kind, more))
        for number, (x, y) in enumerate(places):
            parts.append(f'<circle cx="{x}" cy="{y}" r="20" class="{kind}"/>')
            parts.append(f'<text x="{x}" y="{y + 5}" text-anchor="middle" class="on">{number}</text>')
        said = (
            ("weights out, gradients back: the first", "sends N-1 models and receives N-1")
            if kind == "one"
            else ("each sends 2(N-1)/N of a model to its", "neighbour, and receives as much")
        )
        for row, words in enumerate(said):
            parts.append(text(left + 150, 275 + 16 * row, words, "middle", "small"))
    save("dp-exchange.svg", "What is sent in a step", 630, 300, parts)


def volume(rows: Sequence[dict[str, Any]]) -> None:
    """Draw the models sent by the busiest device: formulas as lines, measurements as dots."""
    left, bottom, width, height, most = 60, 250, 440, 210, 8

    def place(ranks: float, models: float) -> tuple[float, float]:
        return left + width * (ranks - 1) / (most - 1), bottom - height * models / (most - 1)

    parts = [line(left, bottom, left + width, bottom), line(left, bottom, left, bottom - height)]
    for number in range(1, most + 1):
        x, _ = place(number, 0)
        parts.append(text(x, bottom + 18, str(number), "middle", "small"))
    for models in range(0, most, 2):
        _, y = place(1, models)
        parts.append(text(left - 8, y + 4, str(models), "end", "small"))
    parts.append(text(left + width / 2, bottom + 38, "devices", "middle"))
    parts.append(
        text(left - 40, 24, "models of bytes that the busiest device sends in a step", "start", "bold")
    )
    counts = range(1, most + 1)
    parts.append(path([place(n, n - 1) for n in counts], "one"))
    parts.append(path([place(n, 2 * (n - 1) / n) for n in counts], "two"))
    parts.append(text(*place(5.3, 5.1), "by way of one: N-1", "end"))
    parts.append(text(*place(5.3, 2.1), "ring: 2(N-1)/N"))
    for row in rows:
        x, y = place(row["ranks"], row["sent"] / (4 * row["parameters"]))
        kind = "two" if row["way"] == "ring" else "one"
        if row["parameters"] > 500_000:
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" class="{kind}"/>')
    if rows:
        said = "dots: measured over gloo, 1 and 10 million parameters"
        parts.append(text(left + width, bottom - 8, said, "end", "small"))
    save("dp-volume.svg", "Bytes through the busiest device", 530, 300, parts)


def threads(rows: Sequence[dict[str, Any]]) -> None:
    """Draw two replicas at once by threads and by processes, next to one after the other."""
    scale, parts = (
        150,
        [text(20, 24, "two replicas at once, times as fast as one after the other", kind="bold")],
    )
    for number, row in enumerate(rows):
        top = 50 + 62 * number
        parts.append(text(150, top + 24, row["model"], "end"))
        for shift, way, kind in ((0, "threads", "one"), (20, "processes", "two")):
            parts.append(rect(160, top + shift, scale * row[way], 16, kind))
            parts.append(
                text(166 + scale * row[way], top + shift + 13, f"{row[way]:.2f} {way}", kind="small")
            )
    bottom = 50 + 62 * len(rows)
    for times in (1, 2):
        x = 160 + scale * times
        parts.append(line(x, 40, x, bottom, more='stroke-dasharray="4 4"'))
        parts.append(text(x, bottom + 14, f"{times}", "middle", "small"))
    save("dp-threads.svg", "Threads and processes", 560, bottom + 24, parts)


def shares() -> None:
    """Draw a step of two ranks, the second three times as slow: equal shares, and 3:1."""
    parts, unit = [], 100.0
    for top, title, works in (
        (0, "equal shares, 32:32", (1.0, 3.0)),
        (110, "--batch-shares 3:1, 48:16", (1.5, 1.5)),
    ):
        parts.append(text(20, top + 24, title, kind="bold"))
        end = max(works)
        for rank, work in enumerate(works):
            y = top + 36 + 26 * rank
            parts.append(text(20, y + 15, f"rank {rank}"))
            parts.append(rect(80, y, unit * work, 20, "two" if rank == 0 else "one"))
            parts.append(rect(80 + unit * work, y, unit * (end - work), 20, "wait"))
            if end > work:
                parts.append(text(86 + unit * work, y + 15, "waits", kind="small"))
        parts.append(line(80 + unit * end, top + 30, 80 + unit * end, top + 90))
        parts.append(text(86 + unit * end, top + 62, "the step ends"))
    save("dp-shares.svg", "A slow rank and unequal shares", 500, 215, parts)


def main() -> None:
    results = HERE / "results" / "dp_vs_ddp.json"
    found = json.loads(results.read_text()) if results.exists() else {}
    exchange()
    shares()
    volume(found.get("bytes", []))
    if "threads" in found:
        threads(found["threads"])


if __name__ == "__main__":
    main()
