"""Prepare the run directory: the job that it belongs to, and config.json."""

import logging
import time
from pathlib import Path

from tandem import layout
from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.listing import is_finished
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.platforms.placement import Placement
from tandem.report.trackers import check
from tandem.run.directory import RunDir, unwritable
from tandem.run.lease import Lease
from tandem.telemetry.health import HealthLimits, record, write_run_health
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")


def adjust_for_job(run: RunDir, settings: Settings, placement: Placement) -> Settings:
    """Adjust the settings if a scheduler starts a job repeatedly, or many alike, in one run directory.

    Every task of a job array needs its own run directory: they would overwrite each other's checkpoints, or
    find the run complete. The first task writes its number down; the others get a ConfigError. Every node
    checks this if it can see the directory, because a node that waited for a refused node 0 would exit with
    200 and be restarted.

    A job that the scheduler restarts resumes despite `--resume never`, or it would never end.
    """
    folder = run.folder
    never = settings.checkpoint.resume == "never"
    if not run.is_here:
        return settings
    is_first = not placement.node_rank and not placement.rank
    never_yet = is_first and never and bool(placement.job)
    if placement.array is not None or never_yet:
        run.make_private()
    try:
        if placement.array is not None:
            array, task = placement.array
            if (other := _write_once(folder / layout.array_note(array), task)) != task:
                raise ConfigError(
                    f"{folder} belongs to task {other} of array {array}, but this is task {task}; give each "
                    "task its own run directory (Slurm: --run-dir runs/$SLURM_ARRAY_TASK_ID)"
                )
        if never_yet:
            before = _write_once(folder / layout.begun_note(placement.job), str(placement.restarts))
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


def _write_once(note: Path, text: str) -> str:
    """Return `text` if this call is the first to write it to `note`, else what is there already."""
    note.parent.mkdir(parents=True, exist_ok=True)
    try:
        with note.open("x", encoding="ascii") as file:  # exclusive creation works on NFS, too
            file.write(text)
        return text
    except FileExistsError:
        return note.read_text(encoding="ascii")


def prepare_run_dir(run: RunDir, settings: Settings, lease: Lease, decision: ResumeDecision | None) -> None:
    """Create the run directory and write config.json.

    Removes the last launch's summary, unless the run is complete. A run that does not resume is a new one for
    a tracker. Without a `decision`, a script decides by itself where it resumes. Raises ConfigError.
    """
    is_new = settings.checkpoint.resume == "never" or (decision is not None and decision.moved_to is not None)
    over = decision.kind == "complete" if decision is not None else is_finished(run.checkpoints)
    check(settings.telemetry.remote_tracker)
    try:
        if lease.problem is not None:
            raise lease.problem
        run.make_folder()
        write_json_atomic(run.folder / layout.CONFIG, settings.to_dict())
        run.mirror.begin((run.folder / layout.CONFIG).read_bytes(), keeps_summary=over)
        if not over:
            run.forget_summary()
            limit = HealthLimits.asked(settings.launch, settings.reliability).of("starting")
            write_run_health(run.folder, record("starting", 0, time.time(), limit))
        if is_new:
            (run.folder / layout.TRACKER).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run.where, error) from error
    if not run.is_here:
        log.info("logs and other local files are in %s", run.folder)
