"""Prepare the run directory: the job that it belongs to, and config.json."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem import layout
from tandem.checkpoint.decision import ResumeDecision
from tandem.checkpoint.listing import is_finished
from tandem.checkpoint.storage.lease_records import create_whole
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.platforms.detection import Placement
from tandem.report.tracking import check_tracker, copied_from
from tandem.run.directory import RunDir, unwritable
from tandem.run.lease import Lease
from tandem.telemetry.health import HealthLimits, record, write_run_health
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")


def adjust_for_job(run: RunDir, settings: Settings, placement: Placement) -> Settings:
    """Adjust the settings if a scheduler restarts a job, or starts a job array, in one run directory.

    Every task of a job array needs its own run directory. In a shared one, they would overwrite each other's
    checkpoints or find the run complete. The first task records its number; the others get a ConfigError.
    Every node that sees the directory checks this, because a node that waited for a refused node 0 would exit
    with 200 and be restarted.

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
    """Write `text` to the file `note` unless it exists; return the file's content.

    All nodes do this at once. None may find the file of another one empty.
    """
    if not note.exists():  # on a full volume, a job that comes back can still read it
        create_whole(note, text.encode())
    return note.read_text(encoding="ascii")


def prepare_run_dir(run: RunDir, settings: Settings, lease: Lease, decision: ResumeDecision | None) -> None:
    """Create the run directory and write config.json.

    Removes the last launch's summary, unless the run is complete. To a tracker, a run that does not resume is
    a new run. Without a `decision`, a script decides where it resumes. Raises ConfigError.
    """
    is_new = settings.checkpoint.resume == "never" or (decision is not None and decision.moved_to is not None)
    over = decision.kind == "complete" if decision is not None else is_finished(run.checkpoints)
    check_tracker(settings.telemetry.remote_tracker)
    original = copied_from(run)
    try:
        if lease.problem is not None:
            raise lease.problem
        run.make_folder()
        write_json_atomic(run.folder / layout.CONFIG, settings.to_dict())
        run.mirror.begin((run.folder / layout.CONFIG).read_bytes(), keeps_summary=over)
        if not over:
            run.forget_summary()
            limit = HealthLimits.from_settings(settings.launch, settings.reliability).of("starting")
            write_run_health(run.folder, record("starting", 0, 0.0, limit))
        if original is not None:
            log.info("this run is a copy of %s, so it is a new run at its tracker", original)
        if is_new or original is not None:
            (run.folder / layout.TRACKER).unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(run.where, error) from error
    if not run.is_here:
        log.info("logs and other local files are in %s", run.folder)


# Per-agent temp directory for sockets; removed on exit, stale ones cleaned up by later agents.

SOCKET_BYTES = 107  # unix(7): 108 with the terminating zero
LONGEST_NAME = len("/listener-12345678")  # the name that multiprocessing gives its socket
ELSEWHERE = ("/tmp", "/dev/shm")


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary directory for this process, and remove it at the end.

    Its path is short enough for the name of a socket in it. Its name has the process ID and the PID namespace
    in which the ID counts, because containers may share a temporary directory. Directories of processes that
    are gone are removed before and after, because a launch may have killed a simulated node. Raises
    ConfigError if no directory can be created.
    """
    prefix = f"tandem-{os.stat('/proc/self/ns/pid').st_ino}-"
    parents = _parents(f"{prefix}{os.getpid()}-12345678")
    for parent in parents:
        _sweep(parent, prefix)
    folder = _make(parents, f"{prefix}{os.getpid()}-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in parents:
            _sweep(parent, prefix)


def _parents(name: str) -> list[Path]:
    """Return where to put it: the temporary directory, or other directories if that path is too long."""
    try:
        wanted = [tempfile.gettempdir(), *ELSEWHERE]
    except OSError:  # no candidate is writable
        wanted = [*ELSEWHERE]
    return [
        Path(each) for each in wanted if len(os.fsencode(f"{each}/{name}")) + LONGEST_NAME <= SOCKET_BYTES
    ]


def _sweep(parent: Path, prefix: str) -> None:
    for old in parent.glob(f"{prefix}*"):
        owner = old.name.removeprefix(prefix).partition("-")[0]
        if not Path("/proc", owner).exists():
            shutil.rmtree(old, ignore_errors=True)  # another user's cannot be removed


def _make(parents: list[Path], prefix: str) -> Path:
    problem: OSError | None = None
    for parent in parents:
        try:
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        except OSError as error:
            problem = problem or error
    raise ConfigError(
        f"cannot create a temporary directory in {' or '.join(map(str, parents))}: "
        f"{problem.strerror if problem else 'no such directory'}; set TMPDIR to a writable directory"
    )
