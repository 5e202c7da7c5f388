"""A real run, a rank of it killed, and what the terminal said and when, as a picture that moves (SVG).

    python benchmarks/recovery_picture.py [--picture docs/pictures/recovery.svg]

Two nodes train the digits. After the first log line past step 400, `tandem kill --rank 1` is typed as a
person would. Each line appears in the picture when it appeared on the terminal; the start, up to the first
line of a step, is cut to a second, and three dots stand for it. Who wants no movement
(prefers-reduced-motion) sees all lines at once.
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

COLUMNS, ROW, TOP, LEFT, LETTER = 112, 18, 30, 14, 7.22
KILL_AFTER_STEP = 400
LINGER_SECONDS = 6.0  # the last picture, before it begins anew
LIMIT_SECONDS = 300
COLOURS = {"$": "#e3b341", "was killed": "#ff7b72", "resuming from": "#79c0ff", "finished": "#7ee787"}
FLAGS = ("--nodes", "2", "--epochs", "3", "--log-every", "100")
QUIETLY = ("--metrics-linger", "0", "--metrics", "0")


class Line(NamedTuple):
    seconds: float
    text: str


def record(folder: Path) -> list[Line]:
    """The lines of the run, and the command that killed a rank, each with its time since the start."""
    tandem = [sys.executable, "-m", "tandem"]
    started, killed, lines = time.monotonic(), False, [Line(0.0, "$ tandem launch " + " ".join(FLAGS))]
    command = [*tandem, "launch", *FLAGS, *QUIETLY, "--run-dir", "runs/digits"]
    with subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        assert run.stdout is not None
        for text in run.stdout:
            lines.append(Line(time.monotonic() - started, text.rstrip().replace(f"{folder}/", "")))
            step = re.search(r" step (\d+) of ", text)
            if step and int(step[1]) >= KILL_AFTER_STEP and not killed:
                killed = True
                lines.append(Line(time.monotonic() - started, "$ tandem kill runs/digits --rank 1"))
                subprocess.run([*tandem, "kill", "runs/digits", "--rank", "1"], cwd=folder, check=True)
        if run.wait(LIMIT_SECONDS) != 0 or not killed:
            sys.exit("\n".join(line.text for line in lines))
    return lines


def shown(lines: Sequence[Line]) -> list[Line]:
    """The command, dots, and everything from the first step on, as if that had come after a second."""
    first = next(place for place, line in enumerate(lines) if re.search(r" step \d+ of ", line.text))
    ahead = lines[first].seconds - 1.5
    return [
        lines[0],
        Line(0.8, "..."),
        *(Line(line.seconds - ahead, line.text) for line in lines[first:] if line.text),
    ]


def drawn(lines: Sequence[Line]) -> str:
    """The SVG: a row for each line, which a style makes visible at its time."""
    whole = lines[-1].seconds + LINGER_SECONDS
    styles, rows = [], []
    for number, line in enumerate(lines):
        share = 100 * line.seconds / whole
        styles.append(
            f"@keyframes l{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}"
            f"#l{number}{{animation:l{number} {whole:.1f}s infinite}}"
        )
        text = line.text if len(line.text) <= COLUMNS else line.text[: COLUMNS - 1] + "…"
        colour = next((colour for word, colour in COLOURS.items() if word in text), "#c9d1d9")
        place = TOP + ROW * number
        rows.append(f'<text id="l{number}" x="{LEFT}" y="{place}" fill="{colour}">{escape(text)}</text>')
    width, height = 2 * LEFT + COLUMNS * LETTER, TOP + ROW * len(lines)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img"'
            ' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
            "<title>A rank is killed, and the run goes on from the same step</title>",
            "<style>text{white-space:pre}" + "".join(styles),
            "@media (prefers-reduced-motion:reduce){text{animation:none!important}}</style>",
            '<rect width="100%" height="100%" rx="8" fill="#0d1117"/>',
            *rows,
            "</svg>\n",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--picture", type=Path, default=Path("docs/pictures/recovery.svg"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lines = record(Path(folder))
    options.picture.write_text(drawn(shown(lines)), encoding="utf-8")
    print(f"{options.picture}: {len(lines)} lines, {lines[-1].seconds:.0f} s")


if __name__ == "__main__":
    main()
