"""`tandem runs`: the runs in a folder, how each ended, and what it takes up. Reads files alone, no torch."""

import shutil
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoint.claim import owner_here
from tandem.checkpoint.listing import age_in_words, newest_step
from tandem.checkpoint.storage.copies import RUN_FILES
from tandem.errors import ConfigError
from tandem.telemetry.journal import read_json
from tandem.timeouts import SETTLED_SECONDS

OPEN, RUNNING, NOT_BEGUN = "open", "running", "not begun"
"""States of a run without a summary; the rest are those that a summary has."""
NOTES = frozenset((*RUN_FILES, "log", "tensorboard", "profile", "report.html", "wandb"))
"""What tandem writes about a run, by its name in the run's folder."""
HEADS = ("run", "state", "step", "saved", "scores", "last word", "MB")


@dataclass(frozen=True)
class RunRow:
    """One run; `state` is that of its summary, or one of those above."""

    path: Path
    state: str
    step: int | None
    saved_step: int | None
    scores: dict[str, float]
    age_seconds: float
    bytes: int
    is_all_notes: bool = False  # no checkpoint, damaged or set aside, and no file that is not tandem's own

    @property
    def is_empty(self) -> bool:
        """Whether it has ended and left nothing to go on from, or to use."""
        settled = self.state in (OPEN, NOT_BEGUN) and self.age_seconds > SETTLED_SECONDS
        return self.is_all_notes and (settled or self.state in ("failed", "stopped"))


def find_runs(folder: Path, now: float | None = None) -> list[RunRow]:
    """The runs in `folder`, newest first; `folder` itself where it is one. Raises ConfigError."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a directory; give the folder of the runs, such as runs")
    now = time.time() if now is None else now
    places = [folder] if _is_run(folder) else [each for each in folder.iterdir() if _is_run(each)]
    return sorted((_row(place, now) for place in places), key=lambda row: (row.age_seconds, row.path))


def clean(rows: Sequence[RunRow], dry_run: bool = False) -> list[RunRow]:
    """Remove what `is_empty`; the rows removed, or that would be. Raises ConfigError."""
    doomed = [row for row in rows if row.is_empty]
    for row in doomed if not dry_run else []:
        try:
            shutil.rmtree(row.path)
        except OSError as error:
            raise ConfigError(f"cannot remove {row.path}: {error.strerror or error}") from error
    return doomed


def table(rows: Sequence[RunRow], folder: Path) -> str:
    """Aligned lines."""
    if not rows:
        return f"no runs in {folder}"
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    if any(row.state == OPEN for row in rows):
        lines.append("open: killed, or on another machine; the same command goes on from what is saved")
    return "\n".join(line.rstrip() for line in lines)


def _is_run(folder: Path) -> bool:
    """What every run writes before its first rank starts; a link is another folder's run."""
    return (folder / "config.json").is_file() and not folder.is_symlink()


def _row(folder: Path, now: float) -> RunRow:
    summary, files = read_json(folder / "summary.json"), _files(folder)
    saved = newest_step(folder / "checkpoints")
    scores = summary.get("eval")
    return RunRow(
        path=folder,
        state=str(summary.get("state") or _state_of_unended(folder, saved)),
        step=summary.get("global_step", saved),
        saved_step=saved,
        scores=scores if isinstance(scores, dict) else {},
        age_seconds=max(0.0, now - max((changed for _, _, changed in files), default=now)),
        bytes=sum(size for _, size, _ in files),
        is_all_notes=_is_all_notes(folder),
    )


def _state_of_unended(folder: Path, saved: int | None) -> str:
    """RUNNING: its launch is seen on this machine. NOT_BEGUN: it has saved nothing and logged no step."""
    if owner_here(folder) is not None:
        return RUNNING
    begun = saved is not None or (folder / "metrics.jsonl").exists()
    return OPEN if begun else NOT_BEGUN


def _is_all_notes(folder: Path) -> bool:
    if "://" in str(read_json(folder / "config.json").get("run_dir")):  # its checkpoints lie elsewhere
        return False
    try:
        others = [each for each in folder.iterdir() if each.name not in NOTES]
        return all(each.is_dir() and not any(each.iterdir()) for each in others)
    except OSError:
        return False


def _files(folder: Path) -> list[tuple[Path, int, float]]:
    """(path below, bytes, last change in Unix seconds) of every file; what goes meanwhile is left out."""
    found = []
    for path in folder.rglob("*"):
        try:
            facts = path.lstat()
        except OSError:
            continue
        if not stat.S_ISDIR(facts.st_mode):
            found.append((path.relative_to(folder), facts.st_size, facts.st_mtime))
    return found


def _cells(row: RunRow) -> tuple[str, ...]:
    scores = ", ".join(f"{name} {value:.4g}" for name, value in sorted(row.scores.items()))
    saved = "none" if row.saved_step is None else f"{row.saved_step:,}"
    step = "" if row.step is None else f"{row.step:,}"
    age = f"{age_in_words(row.age_seconds)} ago"
    return row.path.name, row.state, step, saved, scores, age, f"{row.bytes / 1e6:,.1f}"
