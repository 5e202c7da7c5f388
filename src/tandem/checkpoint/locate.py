"""Find the checkpoints a user names: a run, its checkpoints directory, or one step. No torch here."""

from pathlib import Path, PurePath

from tandem import layout
from tandem.checkpoint.storage.protocol import STEP_NAME
from tandem.checkpoint.store import CheckpointStore
from tandem.config.address import address
from tandem.errors import ConfigError
from tandem.paths import exists, is_directory

LINKED = "checkpoints is a symbolic link, which tandem does not follow"


def is_linked(run_dir: PurePath) -> bool:
    """Return True if `checkpoints` in the run is a symbolic link, which readers must not follow."""
    return isinstance(run_dir, Path) and (run_dir / layout.CHECKPOINTS).is_symlink()


def checkpoints_of(run: str | PurePath) -> CheckpointStore:
    """Return the checkpoints of a run, or those in `run` itself if it is a directory of checkpoints.

    Raises ConfigError if it is a symbolic link in the run.
    """
    path = address(run)
    if is_linked(path):
        raise ConfigError(f"{path}: {LINKED}; give the directory it points to")
    inner = CheckpointStore(path / layout.CHECKPOINTS)
    has_inner = is_directory(inner.directory) if isinstance(path, Path) else inner.steps()
    return inner if has_inner else CheckpointStore(path)


def locate(text: str) -> tuple[CheckpointStore, int | None]:
    """PATH[@STEP] -> the store and the step (None: the newest). PATH is a run, its checkpoints, or one step.

    Raises ConfigError if there is no such checkpoint.
    """
    # An existing file or directory wins, because a run's name may itself contain an @.
    name, at, number = text.rpartition("@")
    step = int(number) if at and number.isdecimal() and not exists(Path(text)) else None
    path = address(text if step is None else name)
    if isinstance(path, Path):
        if not is_directory(path):
            raise ConfigError(
                f"{path} is not a directory; give a run, its checkpoints directory, or one step-... in it"
            )
        path = path.resolve()
    if step is None and (match := STEP_NAME.fullmatch(path.name)):
        path, step = path.parent, int(match[1])
    store = checkpoints_of(path)
    steps = store.steps()
    if not steps:
        raise ConfigError(f"{store.directory} contains no checkpoint; give a run that has saved one")
    if step is not None and step not in steps:
        there = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
        raise ConfigError(f"{store.directory} has no checkpoint of step {step}; available steps: {there}")
    return store, step
