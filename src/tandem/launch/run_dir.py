"""Prepare the run directory: permissions, config.json, and the decision where to resume."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePath

from tandem.checkpoint.claim import Claim, claim
from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.listing import is_finished
from tandem.checkpoint.storage.copies import Copies, local_folder, make_folder
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.paths import exists
from tandem.platforms.environment import LOOPBACK
from tandem.platforms.placement import Placement
from tandem.report.trackers import check
from tandem.report.tracking import FILE_NAME
from tandem.telemetry.health import Limits, record, write_run_health
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")

STARTED_ONCE = ("kubeflow-v1", "kubeflow-v2", "jobset", "indexed-job", "compose")
"""Platforms that restart a node only after its last start has ended."""


def resolve_run_dir(settings: Settings, placement: Placement, now: float) -> Settings:
    """Return the settings with an absolute run directory.

    The default name, with the time in it, is only for a laptop: other nodes would pick another time. Raises
    ConfigError elsewhere if no run directory is set.
    """
    run_dir = settings.run.run_dir
    if run_dir is None:
        if placement.platform != "none":
            raise ConfigError(
                "no run directory is set, and all ranks need the same one; set TANDEM_RUN_DIR=runs/NAME "
                "before the command, or give --run-dir runs/NAME; several nodes need it on a shared volume"
            )
        name = settings.run.task.rpartition(":")[2] if ":" in settings.run.task else settings.run.task
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}"
    if isinstance(run_dir, Path):
        run_dir = run_dir.absolute()
    return settings.replace(run_dir=run_dir, data_dir=settings.data.data_dir.absolute())


def open_run_folder(settings: Settings) -> None:
    """Create the run directory with mode 700 if it is missing. Errors are left to the code that writes there.

    Its files need no modes of their own, because no other user can enter the directory.
    """
    folder = local_folder(settings.run.place)
    if folder != settings.run.place:
        return
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)


@contextmanager
def run_folder(settings: Settings, is_first: bool = True) -> Iterator[None]:
    """Call `open_run_folder`; at the end, the first node removes empty directories that it created."""
    folder = local_folder(settings.run.place)
    made = [each for each in (folder, *folder.parents) if is_first and not exists(each)]
    open_run_folder(settings)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, or removed together with the lease on it
            for each in made:
                if exists(each):
                    each.rmdir()


def open_log_folder(run_dir: Path) -> bool:
    """Create the log directory for simulated nodes; return whether it is new. Raises ConfigError."""
    folder = run_dir / "log"
    is_new = not exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return is_new


def forget_mistake(run_dir: Path) -> None:
    """Remove the logs of a launch that found only a configuration error, which the terminal has shown.

    Without config.json there was no run.
    """
    if not exists(run_dir / "config.json"):
        shutil.rmtree(run_dir / "log", ignore_errors=True)


def of_this_job(settings: Settings, placement: Placement) -> Settings:
    """Adjust the settings if a scheduler starts a job repeatedly, or many alike, in one run directory.

    Every task of a job array needs its own run directory: they would overwrite each other's checkpoints, or
    find the run complete. The first task writes its number down; the others get a ConfigError. Every node
    checks this if it can see the directory, because a node that waited for a refused node 0 would exit with
    200 and be restarted.

    A job that the scheduler restarts resumes despite `--resume never`, or it would never end.
    """
    folder, never = local_folder(settings.run.place), settings.checkpoint.resume == "never"
    if folder != settings.run.place:
        return settings
    is_first = not placement.node_rank and not placement.rank
    never_yet = is_first and never and bool(placement.job)
    if placement.array is not None or never_yet:
        open_run_folder(settings)
    try:
        if placement.array is not None:
            array, task = placement.array
            if (other := _noted(folder / f"array-{array}", task)) != task:
                raise ConfigError(
                    f"{folder} belongs to task {other} of array {array}, but this is task {task}; give each "
                    "task its own run directory (Slurm: --run-dir runs/$SLURM_ARRAY_TASK_ID)"
                )
        if never_yet:
            before = _noted(folder / f"begun-{placement.job}", str(placement.restarts))
            if int(before or 0) < placement.restarts:
                log.info(
                    "restart %d of this job: resuming; --resume never applies only to its first start",
                    placement.restarts,
                )
                return settings.replace(resume="auto")
    except OSError as error:
        if is_first:
            raise _unwritable(folder, error) from error
    return settings


def _noted(note: Path, text: str) -> str:
    """Return `text` if this call is the first to write it to `note`, else what is there already."""
    note.parent.mkdir(parents=True, exist_ok=True)
    try:
        with note.open("x", encoding="ascii") as file:  # exclusive creation works on NFS, too
            file.write(text)
        return text
    except FileExistsError:
        return note.read_text(encoding="ascii")


def _unwritable(where: PurePath, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"cannot write to the run directory {where}: {reason}; give another --run-dir")


@contextmanager
def owned(
    settings: Settings, placement: Placement, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Claim]:
    """Hold the lease on the run directory in this block. Raises ConfigError if another launch holds it."""
    with closing(claim(settings.run.place, _restarted_as(placement), should_stop)) as mine:
        yield mine


def _restarted_as(placement: Placement) -> str:
    """Return a name of this job that survives a restart of its nodes; "" if there is none.

    It is used only on platforms that restart a node after its last start has ended. A pod's name belongs to
    one job, and its successor is created only once it is gone.
    """
    if placement.job or placement.platform not in STARTED_ONCE:
        return placement.job
    is_name = placement.master_host not in ("localhost", LOOPBACK)
    name = placement.master_host if is_name else os.uname().nodename
    return f"{placement.platform} {name}:{placement.master_port}"


def prepare_run_dir(settings: Settings, mine: Claim, decision: ResumeDecision | None) -> Copies:
    """Create the run directory and write config.json; return the copies of the files that the run writes.

    Removes the last launch's summary, unless the run is complete. A run that does not resume is a new one for
    a tracker. Without a `decision`, a script decides by itself where it resumes. Raises ConfigError.
    """
    is_new = settings.checkpoint.resume == "never" or (decision is not None and decision.moved_to is not None)
    where, copies = settings.run.place, Copies(settings.run.place)
    over = decision.kind == "complete" if decision is not None else is_finished(where / "checkpoints")
    folder = local_folder(where)
    check(settings.telemetry.remote_tracker)
    try:
        if mine.problem is not None:
            raise mine.problem
        make_folder(folder)
        write_json_atomic(folder / "config.json", settings.to_dict())
        copies.begin((folder / "config.json").read_bytes(), keeps_summary=over)
        if not over:
            (folder / "summary.json").unlink(missing_ok=True)
            limit = Limits.asked(settings.launch, settings.reliability).of("starting")
            write_run_health(folder, record("starting", 0, time.time(), limit))
        if is_new:
            (folder / FILE_NAME).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(where, error) from error
    if folder != where:
        log.info("logs and other local files are in %s", folder)
    return copies


def decide(settings: Settings) -> ResumeDecision:
    """Decide where the run resumes, and log it.

    Called once, on node 0, before any rank starts.
    """
    run_dir = settings.run.place
    decision = decide_resume(settings, CheckpointStore(run_dir / "checkpoints"))
    if decision.kind == "complete":
        log.info(
            "the run in %s already finished at step %s; raise --epochs or --steps to continue",
            run_dir,
            f"{decision.step:,}",
        )
        return decision
    for change in decision.changes:
        log.info("changed since the checkpoint: %s", change)
    if decision.moved_to is not None:
        log.info("earlier checkpoints were moved to %s", decision.moved_to)
    return decision
