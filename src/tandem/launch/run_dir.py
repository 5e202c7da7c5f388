"""Prepare the run directory: of which job it is, config.json, and the decision where to resume."""

import logging
from pathlib import Path

from tandem import layout
from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.listing import is_finished
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.platforms.placement import Placement
from tandem.report.trackers import check
from tandem.run.directory import RunDir, unwritable
from tandem.run.lease import Claim
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")


def of_this_job(run: RunDir, settings: Settings, placement: Placement) -> Settings:
    """The settings, where the scheduler starts a job several times, or many alike, in one run directory.

    Every task of a job array has a run directory of its own: the first that comes writes its name down, and
    for the others this raises ConfigError; they would save over each other, or find the run complete. All
    nodes look, where they see the folder: one that waited for a refused node 0 would end with 200, and come
    back. A job that comes back after `--resume never` goes on, or it would never end.
    """
    folder, never = run.folder, settings.checkpoint.resume == "never"
    if not run.is_here:
        return settings
    is_first = not placement.node_rank and not placement.rank
    never_yet = is_first and never and bool(placement.job)
    if placement.array is not None or never_yet:
        run.make_private()
    try:
        if placement.array is not None:
            array, task = placement.array
            if (other := _noted(folder / layout.array_note(array), task)) != task:
                raise ConfigError(
                    f"{folder} belongs to task {other} of array {array}, but this is task {task}; give each "
                    "task its own run directory (Slurm: --run-dir runs/$SLURM_ARRAY_TASK_ID)"
                )
        if never_yet:
            before = _noted(folder / layout.begun_note(placement.job), str(placement.restarts))
            if int(before or 0) < placement.restarts:
                log.info(
                    "restart %d of this job: resuming; --resume never applies only to its first start",
                    placement.restarts,
                )
                return settings.replace(resume="auto")
    except OSError as error:
        if is_first:
            raise unwritable(folder, error) from error
    return settings


def _noted(note: Path, text: str) -> str:
    """`text`, if it is the first to be written down there, else what was before."""
    note.parent.mkdir(parents=True, exist_ok=True)
    try:
        with note.open("x", encoding="ascii") as file:  # exclusive, on NFS as well
            file.write(text)
        return text
    except FileExistsError:
        return note.read_text(encoding="ascii")


def prepare_run_dir(run: RunDir, settings: Settings, mine: Claim, decision: ResumeDecision | None) -> None:
    """Make the run directory, write config.json. Raises ConfigError.

    The last launch's summary goes, unless the run is complete. A run that does not go on from where it was is
    another one for a tracker. Without a `decision` the run is a program's, which decides by itself.
    """
    is_new = settings.checkpoint.resume == "never" or (decision is not None and decision.moved_to is not None)
    over = decision.kind == "complete" if decision is not None else is_finished(run.checkpoints)
    check(settings.telemetry.remote_tracker)
    try:
        if mine.problem is not None:
            raise mine.problem
        run.make_folder()
        write_json_atomic(run.folder / layout.CONFIG, settings.to_dict())
        run.mirror.begin((run.folder / layout.CONFIG).read_bytes(), keeps_summary=over)
        if not over:
            run.forget_summary()
        if is_new:
            (run.folder / layout.TRACKER).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run.where, error) from error
    if not run.is_here:
        log.info("logs and other local files are in %s", run.folder)


def decide(run: RunDir, settings: Settings) -> ResumeDecision:
    """Where the run begins, decided once on node 0 before any rank starts, and said in a line each."""
    decision = decide_resume(settings, run.checkpoints)
    if decision.kind == "complete":
        log.info(
            "the run in %s already finished at step %s; raise --epochs or --steps to continue",
            run.where,
            f"{decision.step:,}",
        )
        return decision
    for change in decision.changes:
        log.info("changed since the checkpoint: %s", change)
    if decision.moved_to is not None:
        log.info("earlier checkpoints were moved to %s", decision.moved_to)
    return decision
