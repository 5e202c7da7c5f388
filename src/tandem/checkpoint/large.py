"""States that are too large to stand in memory twice: used where they lie, and hashed before and after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoint.store import CheckpointStore, translated
from tandem.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")
LARGE_BYTES = 256 * 2**20


def file_of(store: CheckpointStore, step: int) -> Path | None:
    """The file of a large state in a folder; None for all others. Raises CorruptCheckpointError."""
    if not isinstance(folder := store.path(step), Path):  # a manifest is a request there
        return None
    ((name, wanted),) = store.manifest(step)["files"].items()
    return folder / name if wanted["bytes"] >= LARGE_BYTES else None


def through(
    store: CheckpointStore, step: int, path: Path, use: Callable[[Path], T]
) -> tuple[T, dict[str, Any]]:
    """(what `use` makes of the file, info of its step). Raises CorruptCheckpointError, before it is used.

    What has changed while it was used raises CheckpointError: then nobody knows what was made of it.
    """
    store.verify(step, from_disk=False)
    with translated(f"cannot read {path}"):
        made = use(path)
    try:
        store.verify(step, from_disk=False)
    except CorruptCheckpointError as error:
        raise CheckpointError(f"the file changed while it was being loaded; start again: {error}") from error
    return made, store.info(step)
