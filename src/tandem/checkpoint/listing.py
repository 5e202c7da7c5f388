"""Rows and tables of `tandem checkpoints`, with the reasons why each checkpoint is kept. No torch."""

import time
from dataclasses import dataclass, field
from pathlib import PurePath

from tandem.checkpoint.retention import Best, Retention, Scores
from tandem.checkpoint.store import CheckpointStore
from tandem.errors import CheckpointError, CorruptCheckpointError
from tandem.log import printable

MOST_SCORES = 8
LONGEST_CELL = 100
LONGEST_LINE = 600


@dataclass(frozen=True)
class CheckpointRow:
    """One row of `tandem checkpoints ls`; `verified` is None if the files were not checked."""

    step: int
    path: PurePath
    bytes: int
    age_seconds: float
    verified: bool | None
    problem: str = ""
    scores: Scores = field(default_factory=dict)
    kept: tuple[str, ...] = ()  # reasons of the retention rule; empty: the next prune deletes it


def list_checkpoints(
    store: CheckpointStore, verify: bool = False, now: float | None = None, rule: Retention | None = None
) -> list[CheckpointRow]:
    """Return the rows, newest first. Changes nothing.

    `now` is in Unix seconds; `rule` defaults to `rule_of`. Raises CheckpointError for a volume that cannot be
    read. Checkpoints that are pruned while this runs are left out.
    """
    now = time.time() if now is None else now
    why, sizes = store.why_kept(rule or rule_of(store)), store.sizes()

    def row(step: int) -> CheckpointRow | None:
        return _row(store, step, sizes.get(step, 0), verify, now, tuple(why.get(step, ())))

    def damaged(step: int) -> CheckpointRow:
        size = sizes.get(step, 0)
        lost = "its manifest is missing"
        return CheckpointRow(step, store.path(step), size, 0.0, False, lost, kept=("not counted",))

    rows = [*map(row, store.steps()), *map(damaged, store.without_manifest())]
    return sorted([row for row in rows if row is not None], key=lambda row: -row.step)


def _row(
    store: CheckpointStore, step: int, size: int, verify: bool, now: float, kept: tuple[str, ...]
) -> CheckpointRow | None:
    verified = None
    problem = ""
    written = now
    try:
        written = store.manifest(step)["written_at"]
        if verify:
            store.verify(step)
            verified = True
    # A damaged checkpoint is a row of the table and does not end it.
    except CorruptCheckpointError as error:
        if step not in store.steps():  # pruned in the meantime
            return None
        verified = False
        problem = str(error)
    age = max(0.0, now - written)
    return CheckpointRow(step, store.path(step), size, age, verified, problem, store.scores(step), kept)


def rule_of(
    store: CheckpointStore, newest: int | None = None, best: Best | None = None, every: int | None = None
) -> Retention:
    """Return a rule with the given values.

    The rest are the run's own settings, from its newest readable manifest.
    """
    own: dict[str, object] = {}
    for step in store.steps():
        try:
            own = store.info(step).get("settings", {})
            break
        except CorruptCheckpointError:
            continue
    keep, own_best, own_every = (own.get(name) for name in ("checkpoint_keep", "keep_best", "keep_every"))
    return Retention(
        newest or (keep if isinstance(keep, int) else Retention.newest),
        best or (Best.parse(own_best) if isinstance(own_best, str) else None),
        every or (own_every if isinstance(own_every, int) else None),
    )


def table(rows: list[CheckpointRow], store: CheckpointStore) -> str:
    """Format aligned lines, plus a line about quarantined checkpoints."""
    cells: list[tuple[str, ...]] = [("step", "bytes", "age", "", "kept as", "scores")]
    for row in rows:
        state = {None: "", True: "verified", False: "DAMAGED"}[row.verified]
        scores = scores_in_words(row.scores)
        kept = ", ".join(row.kept) or "next to delete"
        line = (str(row.step), f"{row.bytes:,}", age_in_words(row.age_seconds), state, kept, scores)
        cells.append(tuple(printable(cell, LONGEST_CELL) for cell in line))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        [_line(line, widths) for line in cells]
        if rows
        else [f"no checkpoints in {printable(str(store.directory))}"]
    )
    lines += [printable(f"step {row.step}: {row.problem}", LONGEST_LINE) for row in rows if row.problem]
    if aside := store.quarantined():
        note = f"damaged checkpoints were set aside; inspect or delete them: {', '.join(aside)}"
        lines.append(printable(note, LONGEST_LINE))
    return "\n".join(lines)


def as_json(rows: list[CheckpointRow], store: CheckpointStore) -> dict[str, object]:
    """Return the output of `tandem checkpoints ls --json`, without the checkpoints that were removed."""
    checkpoints = [
        {
            "step": row.step,
            "path": str(row.path),
            "bytes": row.bytes,
            "age_seconds": round(row.age_seconds, 1),
            "verified": row.verified,
            "problem": row.problem or None,
            "scores": row.scores,
            "kept_as": list(row.kept),
        }
        for row in rows
    ]
    return {"directory": str(store.directory), "checkpoints": checkpoints, "set_aside": store.quarantined()}


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    numbers = [cell.rjust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    words = [cell.ljust(width) for cell, width in zip(cells[3:], widths[3:], strict=True) if width]
    return "  ".join([*numbers, *words]).rstrip()


def scores_in_words(scores: Scores) -> str:
    """`accuracy 0.98, loss 0.061`: at most MOST_SCORES scores."""
    words = [f"{name} {value:.4g}" for name, value in sorted(scores.items())]
    more = [f"{len(words) - MOST_SCORES} more"] if len(words) > MOST_SCORES else []
    return ", ".join(words[:MOST_SCORES] + more)


def age_in_words(seconds: float) -> str:
    """Format an age such as `3 h`, in the largest unit that it contains at least twice."""
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def is_finished(store: CheckpointStore) -> bool:
    """Return True if the newest checkpoint is from its run's last step; False if that is unknown.

    Its bytes are verified, because a run that falls back to an older checkpoint still has steps to train.
    """
    try:
        step = max(store.steps(), default=None)
        info = {} if step is None else store.info(step)
        planned = step if "ended_of" in info else info.get("steps_planned")
        if step is None or not isinstance(planned, int) or step < planned:
            return False
        # A large state takes long to read, so check the manifest first.
        store.verify(step)
    except CheckpointError:
        return False
    return True


def newest_step(store: CheckpointStore) -> int | None:
    """Return the newest committed step, by name; None if there is none or the volume fails."""
    try:
        return max(store.steps(), default=None)
    except CheckpointError:
        return None
