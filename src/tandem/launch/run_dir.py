"""Prepare the run directory: permissions, config.json, and the decision where to resume."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path, PurePath

from tandem import layout
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
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")

STARTED_ONCE = ("kubeflow-v1", "kubeflow-v2", "jobset", "indexed-job", "compose")
"""Platforms that start a node again only after its last start has ended."""


def resolve_run_dir(settings: Settings, placement: Placement, now: float) -> Settings:
    """The settings with an absolute run directory; the default with the time in it is for laptops only."""
    run_dir = settings.run.run_dir
    if run_dir is None:
        if placement.platform != "none":
            raise ConfigError(
                f"no run directory is set, and on {placement.platform} all nodes need the same one; "
                "give --run-dir DIR (on the shared volume) or TANDEM_RUN_DIR"
            )
        name = settings.run.task.rpartition(":")[2] if ":" in settings.run.task else settings.run.task
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}"
    if isinstance(run_dir, Path):
        run_dir = run_dir.absolute()
    return settings.replace(run_dir=run_dir, data_dir=settings.data.data_dir.absolute())


def open_run_folder(settings: Settings) -> None:
    """Make the run directory with mode 700 where it is missing; what cannot be is said by who writes there.

    Its files need no modes of their own, because no other user gets there.
    """
    folder = local_folder(settings.run.place)
    if folder != settings.run.place:
        return
    with suppress(OSError):
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)


@contextmanager
def run_folder(settings: Settings, is_first: bool = True) -> Iterator[None]:
    """`open_run_folder`; the first node takes folders away that it has made and nothing has come into."""
    folder = local_folder(settings.run.place)
    made = [each for each in (folder, *folder.parents) if is_first and not exists(each)]
    open_run_folder(settings)
    try:
        yield
    finally:
        with suppress(OSError):  # not empty, or gone with the claim on it
            for each in made:
                if exists(each):
                    each.rmdir()


def open_log_folder(run_dir: Path) -> bool:
    """Make it for nodes that write there, all on this host; whether it is new. Raises ConfigError."""
    folder = run_dir / layout.LOG
    is_new = not exists(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(run_dir, error) from error
    return is_new


def forget_mistake(run_dir: Path) -> None:
    """Nodes have found a mistake, each in its log, and said it on the terminal: no run, no logs of one."""
    if not exists(run_dir / layout.CONFIG):
        shutil.rmtree(run_dir / layout.LOG, ignore_errors=True)


def of_this_job(settings: Settings, placement: Placement) -> Settings:
    """The settings, where the scheduler starts a job several times, or many alike, in one run directory.

    Every task of a job array has a run directory of its own: the first that comes writes its name down, and
    for the others this raises ConfigError; they would save over each other, or find the run complete. All
    nodes look, where they see the folder: one that waited for a refused node 0 would end with 200, and come
    back. A job that comes back after `--resume never` goes on, or it would never end.
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
            raise _unwritable(folder, error) from error
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


def _unwritable(where: PurePath, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"cannot write to the run directory {where}: {reason}; give another --run-dir")


@contextmanager
def owned(
    settings: Settings, placement: Placement, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[Claim]:
    """The run directory is this launch's alone meanwhile. Raises ConfigError where it is another's."""
    with closing(claim(settings.run.place, _restarted_as(placement), should_stop)) as mine:
        yield mine


def _restarted_as(placement: Placement) -> str:
    """What names this job wherever its platform starts it again, after its last start has ended; "": nothing.

    A pod's own name is that of one job, and its successor is made when it is gone.
    """
    if placement.job or placement.platform not in STARTED_ONCE:
        return placement.job
    is_name = placement.master_host not in ("localhost", LOOPBACK)
    name = placement.master_host if is_name else os.uname().nodename
    return f"{placement.platform} {name}:{placement.master_port}"


def prepare_run_dir(settings: Settings, mine: Claim, decision: ResumeDecision | None) -> Copies:
    """Make the run directory, write config.json; the copies of what the run writes. Raises ConfigError.

    The last launch's summary goes, unless the run is complete. A run that does not go on from where it was is
    another one for a tracker. Without a `decision` the run is a program's, which decides by itself.
    """
    is_new = settings.checkpoint.resume == "never" or (decision is not None and decision.moved_to is not None)
    where, copies = settings.run.place, Copies(settings.run.place)
    over = decision.kind == "complete" if decision is not None else is_finished(where / layout.CHECKPOINTS)
    folder = local_folder(where)
    check(settings.telemetry.remote_tracker)
    try:
        if mine.problem is not None:
            raise mine.problem
        make_folder(folder)
        write_json_atomic(folder / layout.CONFIG, settings.to_dict())
        copies.begin((folder / layout.CONFIG).read_bytes(), keeps_summary=over)
        if not over:
            (folder / layout.SUMMARY).unlink(missing_ok=True)
        if is_new:
            (folder / layout.TRACKER).unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(where, error) from error
    if folder != where:
        log.info("logs and other local files are in %s", folder)
    return copies


def decide(settings: Settings) -> ResumeDecision:
    """Where the run begins, decided once on node 0 before any rank starts, and said in a line each."""
    run_dir = settings.run.place
    decision = decide_resume(settings, CheckpointStore(run_dir / layout.CHECKPOINTS))
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
