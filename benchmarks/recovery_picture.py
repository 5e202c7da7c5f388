"""Record a real run in which a rank is killed, and draw the output of two terminals as an SVG of 12 seconds.

    python benchmarks/recovery_picture.py [--picture docs/pictures/recovery.svg]

Two nodes train the digits. Once they train, `tandem kill --rank 1` is typed in the second terminal, as a user
would, in the third second of the animation. Each line appears when it appeared on its terminal. The start and
the end are cut; three dots replace the start. Readers who prefer reduced motion (prefers-reduced-motion) see
all lines at once.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

COLUMNS, ROW, TOP, LEFT, LETTER = 108, 19, 28, 14, 7.22
SECONDS, KILL_AT, AFTER = 12.0, 2.5, 7.5  # of the picture; its kill; what is shown of the time after that
KILL_AFTER_STEP = 200
LIMIT_SECONDS = 120
COLORS = {"$": "#e3b341", "was killed": "#ff7b72", "resuming from": "#79c0ff"}
FLAGS = ("--nodes", "2", "--epochs", "50")
QUIETLY = ("--metrics-linger", "0", "--metrics", "0", "--log-every", "100")
KILL = "$ tandem kill runs/digits --rank 1"


class Line(NamedTuple):
    seconds: float
    text: str


def record(folder: Path) -> tuple[list[Line], float]:
    """Return the lines of the run with their times since its start, and the time of the kill."""
    tandem = [sys.executable, "-m", "tandem"]
    started, killed, lines = time.monotonic(), 0.0, list[Line]()
    command = [*tandem, "launch", *FLAGS, *QUIETLY, "--run-dir", "runs/digits"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for text in run.stdout:
            now = time.monotonic() - started
            lines.append(Line(now, text.rstrip().replace(f"{folder}/", "")))
            step = re.search(r" step (\d+) of ", text)
            if step and int(step[1]) >= KILL_AFTER_STEP and not killed:
                killed = now
                subprocess.run([*tandem, "kill", "runs/digits", "--rank", "1"], cwd=folder, check=True)
            if now > (killed + AFTER if killed else LIMIT_SECONDS):
                run.terminate()
                break
        run.stdout.read()
    if not any("was killed" in line.text for line in lines):
        sys.exit("\n".join(line.text for line in lines))
    return lines, killed


def shown(lines: Sequence[Line], killed: float) -> list[Line]:
    """Return the first terminal's lines: the command, dots, and the output around the kill."""
    near = [line for line in lines if -KILL_AT + 1.0 < line.seconds - killed < AFTER and line.text]
    return [
        Line(0.0, "$ tandem launch " + " ".join(FLAGS)),
        Line(0.5, "..."),
        *(Line(line.seconds - killed + KILL_AT, line.text) for line in near),
    ]


def drawn(lines: Sequence[Line]) -> str:
    """Return the SVG: a row per line, made visible at its time, and a second terminal below."""
    rows = [("terminal 1", 0.0), *((line.text, line.seconds) for line in lines), None]
    rows += [("terminal 2", 0.0), (KILL, KILL_AT)]
    styles, texts = [], []
    for number, row in enumerate(rows):
        if row is None:
            continue
        text, seconds = row
        share = 100 * seconds / SECONDS
        styles.append(
            f"@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
            f"#l{number}{{animation:l{number} {SECONDS:.1f}s infinite}}"
        )
        text = text if len(text) <= COLUMNS else text[: COLUMNS - 1] + "…"
        color = next((color for word, color in COLORS.items() if word in text), "#c9d1d9")
        color = "#8b949e" if text.startswith("terminal ") else color
        place = TOP + ROW * number
        texts.append(f'<text id="l{number}" x="{LEFT}" y="{place}" fill="{color}">{escape(text)}</text>')
    width, height = 2 * LEFT + COLUMNS * LETTER, TOP + ROW * len(rows)
    border = TOP + ROW * (rows.index(None) - 0.3)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
            "<title>A rank is killed, and the run continues from the same step</title>",
            "<style>text{white-space:pre}" + "".join(styles),
            "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
            f'<path d="M0 {border:.0f}H{width:.0f}" stroke="#30363d"/>',
            *texts,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/recovery.svg"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = shown(*record(Path(folder)))
    options.picture.write_text(drawn(lines), encoding="utf-8")
    print("\n".join(f"{line.seconds:5.2f} {line.text}" for line in lines))


if __name__ == "__main__":
    main()
