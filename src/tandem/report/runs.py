"""`tandem runs`: the runs in a directory, their results and sizes. Reads only files, no torch."""

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem import layout
from tandem.checkpoint.decision import LINKED, is_linked
from tandem.checkpoint.listing import age_in_words, newest_step, scores_in_words
from tandem.errors import ConfigError
from tandem.log import printable
from tandem.run.directory import RunDir
from tandem.run.lease import owner_here
from tandem.timeouts import SETTLED_SECONDS

OPEN = "open"
RUNNING = "running"
NOT_BEGUN = "not begun"
"""States of a run without a summary; otherwise, the state is the summary's."""
HEADS = ("run", "state", "step", "saved", "scores", "last update", "MB")
MOST_FILES = 100_000
DEEPEST_FOLDER = 32
"""Limits for measuring one run."""
LONGEST_CELL = 80
LONGEST_LINE = 300


@dataclass(frozen=True)
class RunRow:
    """One run; `state` is from its summary, or one of those above.

    `problems`: phrases that describe what is wrong with its files.
    """

    path: Path
    state: str
    step: int | None
    saved_step: int | None
    scores: dict[str, float]
    age_seconds: float
    bytes: int
    is_all_notes: bool = False  # no checkpoint, damaged or not, and only files that tandem wrote
    problems: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """True if it has ended, and left nothing to resume from or to use."""
        # The process of a run on another machine is not visible. Only recent files show that it may be
        # training.
        settled = self.state in (OPEN, NOT_BEGUN) and self.age_seconds > SETTLED_SECONDS
        return self.is_all_notes and (settled or self.state in ("failed", "stopped"))


def find_runs(folder: Path, now: float | None = None) -> list[RunRow]:
    """Return the runs in `folder`, newest first, or `folder` itself if it is a run. Raises ConfigError."""
    if not folder.is_dir():
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist; expected the directory of your runs")
        raise ConfigError(f"{folder} is not a directory; give the directory of the runs, such as runs")
    now = time.time() if now is None else now
    try:
        run_dirs = [folder] if _is_run(folder) else [each for each in folder.iterdir() if _is_run(each)]
    except OSError as error:
        raise ConfigError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted((_row(run_dir, now) for run_dir in run_dirs), key=lambda row: (row.age_seconds, row.path))


def unreadable(folder: Path) -> list[str]:
    """Return the names of the directories in `folder` that this user may not enter, in order."""
    names = []
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not os.access(entry.path, os.R_OK | os.X_OK):
                names.append(entry.name)
    return sorted(names)


def clean(rows: Sequence[RunRow], dry_run: bool = False) -> list[RunRow]:
    """Remove the runs that are empty; return their rows, or those to remove. Raises ConfigError."""
    # _is_all_notes is checked again, because a file may have been added since the rows were made.
    doomed = [row for row in rows if row.is_empty and _is_all_notes(row.path)]
    for row in doomed if not dry_run else []:
        try:
            shutil.rmtree(row.path)
        except OSError as error:
            raise ConfigError(f"cannot remove {row.path}: {error.strerror or error}") from error
    return doomed


def table(rows: Sequence[RunRow], folder: Path) -> str:
    if not rows:
        return f"no runs in {printable(str(folder))}"
    cells = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    if any(row.state == OPEN for row in rows):
        lines.append("open: killed, or running on another machine; run the same command again to resume")
    for row in rows:
        if row.problems:
            lines.append(printable(f"{row.path.name}: {'; '.join(row.problems)}", LONGEST_LINE))
    return "\n".join(line.rstrip() for line in lines)


def as_json(rows: Sequence[RunRow], folder: Path) -> dict[str, object]:
    """Return the output of `tandem runs --json`, without the runs that were removed."""
    runs = [
        {
            "path": str(row.path),
            "state": row.state,
            "step": row.step,
            "saved_step": row.saved_step,
            "scores": row.scores,
            "age_seconds": round(row.age_seconds, 1),
            "bytes": row.bytes,
            "problems": list(row.problems),
        }
        for row in rows
    ]
    return {"directory": str(folder), "runs": runs}


def _is_run(folder: Path) -> bool:
    """Return True for a folder with config.json, which precedes a run's first rank; False for a link."""
    return os.path.lexists(folder / layout.CONFIG) and not folder.is_symlink()


def _row(folder: Path, now: float) -> RunRow:
    run = RunDir(folder)
    measured = list(_files(folder))
    files = run.files()
    summary = files.read(layout.SUMMARY)
    config = files.read(layout.CONFIG)
    saved = None if is_linked(folder) else newest_step(run.checkpoints)
    step = summary.get("global_step")
    if is_linked(folder):
        files.problems.append(LINKED)
    if len(measured) >= MOST_FILES:
        files.problems.append(f"more than {MOST_FILES:,} files; only the first are counted")
    is_elsewhere = "://" in (config.get("run_dir") or "")  # and so are its checkpoints
    return RunRow(
        path=folder,
        state=summary.get("state") or _state_of_unended(folder, saved),
        step=saved if step is None else step,
        saved_step=saved,
        scores=summary.get("eval") or {},
        # The clock of a network volume may be ahead of this machine's.
        age_seconds=max(0.0, now - max((changed for _, changed in measured), default=now)),
        bytes=sum(size for size, _ in measured),
        # `clean` must not remove a run whose files could not be read: someone else may need them.
        is_all_notes=not is_elsewhere and not files.problems and _is_all_notes(folder),
        problems=tuple(files.problems),
    )


def _state_of_unended(folder: Path, saved: int | None) -> str:
    """Return the state of a run without a summary.

    RUNNING: its launch is on this machine. NOT_BEGUN: it has saved nothing and logged no step.
    """
    if owner_here(folder) is not None:
        return RUNNING
    begun = saved is not None or os.path.lexists(folder / layout.METRICS)
    return OPEN if begun else NOT_BEGUN


def _is_all_notes(folder: Path) -> bool:
    """Return True if there are only files that tandem writes, by type and name, and empty directories."""
    try:
        with os.scandir(folder) as entries:
            return all(_is_note(entry) for entry in entries)
    except OSError:
        return False


def _is_note(entry: os.DirEntry[str]) -> bool:
    if not entry.is_dir(follow_symlinks=False):
        return entry.name in layout.NOTES and entry.is_file(follow_symlinks=False)
    names = layout.FOLDERS_OF_NOTES.get(entry.name)
    with os.scandir(entry.path) as inner:
        return all(
            names is not None
            and names.fullmatch(each.name) is not None
            # wandb keeps each run in a directory, and links to the latest.
            and (each.is_file(follow_symlinks=False) or entry.name == layout.WANDB)
            for each in inner
        )


def _files(folder: Path) -> Iterator[tuple[int, float]]:
    """Yield (bytes, last change in Unix seconds) of at most MOST_FILES files, without following links."""
    folders = [(str(folder), 0)]
    found = 0
    while folders:
        directory, depth = folders.pop()
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    found += 1
                    if found > MOST_FILES:
                        return
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:  # deleted in the meantime
                        continue
                    if not stat.S_ISDIR(facts.st_mode):
                        yield facts.st_size, facts.st_mtime
                    elif depth < DEEPEST_FOLDER:
                        folders.append((entry.path, depth + 1))
        except OSError:  # also deleted, or not readable
            continue


def _cells(row: RunRow) -> tuple[str, ...]:
    saved = "none" if row.saved_step is None else f"{row.saved_step:,}"
    step = "" if row.step is None else f"{row.step:,}"
    age = f"{age_in_words(row.age_seconds)} ago"
    cells = (row.path.name, row.state, step, saved, scores_in_words(row.scores), age)
    return *(printable(cell, LONGEST_CELL) for cell in cells), f"{row.bytes / 1e6:,.1f}"
