"""What a run begins with: its folder, its config.json, and the checkpoint that it goes on from."""

import logging
import time
from pathlib import Path

from tandem.checkpoint.decision import ResumeDecision, decide_resume
from tandem.checkpoint.storage.copies import Copies, local_folder, make_folder
from tandem.checkpoint.store import CheckpointStore
from tandem.config import Settings
from tandem.errors import ConfigError
from tandem.platforms.placement import Placement
from tandem.telemetry.journal import write_json_atomic

log = logging.getLogger("tandem.launch")


def resolve_run_dir(settings: Settings, placement: Placement, now: float) -> Settings:
    """The settings with an absolute run directory; the default with the time in it is for laptops only."""
    run_dir = settings.run.run_dir
    if run_dir is None:
        if placement.platform != "none":
            raise ConfigError(
                f"no run directory is given, and on {placement.platform} all nodes need the same one; "
                "give --run-dir DIR (on the shared volume) or TANDEM_RUN_DIR"
            )
        name = settings.run.task.rpartition(":")[2] if ":" in settings.run.task else settings.run.task
        stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
        run_dir = Path("runs") / f"{name.replace('/', '-')}-{stamp}"
    if isinstance(run_dir, Path):
        run_dir = run_dir.absolute()
    return settings.replace(run_dir=run_dir, data_dir=settings.data.data_dir.absolute())


def prepare_run_dir(settings: Settings) -> Copies:
    """Make the run directory, write config.json; the copies of what the run writes. Raises ConfigError."""
    where, copies = settings.run.place, Copies(settings.run.place)
    folder = local_folder(where)
    try:
        make_folder(folder)
        write_json_atomic(folder / "config.json", settings.to_dict())
        copies.begin((folder / "config.json").read_bytes())
    except OSError as error:
        raise ConfigError(
            f"cannot write to the run directory {where}: {error.strerror or error}; give another --run-dir"
        ) from error
    if folder != where:
        log.info("logs and all that stays on this machine are in %s", folder)
    return copies


def decide(settings: Settings) -> ResumeDecision:
    """Where the run begins, decided once on node 0 before any rank starts, and said in a line each."""
    run_dir = settings.run.place
    decision = decide_resume(settings, CheckpointStore(run_dir / "checkpoints"))
    if decision.kind == "complete":
        log.info(
            "the run in %s is complete at step %d; give more --epochs or --steps to go on",
            run_dir,
            decision.step,
        )
        return decision
    for change in decision.changes:
        log.info("changed since the checkpoint: %s", change)
    if decision.moved_to is not None:
        log.info("earlier checkpoints were moved to %s", decision.moved_to)
    return decision
