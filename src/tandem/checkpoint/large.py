"""Large states, which do not fit in memory twice: use the file in place, and hash it before and after."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from tandem.checkpoint.store import CheckpointStore, translated
from tandem.errors import CheckpointError, CorruptCheckpointError

T = TypeVar("T")
LARGE_BYTES = 256 * 2**20


def file_of(store: CheckpointStore, step: int) -> Path | None:
    """Return the file of a large state in a directory; None for all others. Raises CorruptCheckpointError."""
    # On an object store, reading the manifest costs a request.
    if not isinstance(folder := store.path(step), Path):
        return None
    ((name, wanted),) = store.manifest(step)["files"].items()
    return folder / name if wanted["bytes"] >= LARGE_BYTES else None


def through(
    store: CheckpointStore, step: int, path: Path, use: Callable[[Path], T]
) -> tuple[T, dict[str, Any]]:
    """Return (`use(path)`, info of the step). Raises CorruptCheckpointError before a damaged file is used.

    Raises CheckpointError if the file changed while it was used, because the result may then be wrong.
    """
    # The file is read three times; with the page cache, only the first time is from the disk.
    store.verify(step, from_disk=False)
    with translated(f"cannot read {path}"):
        made = use(path)
    try:
        store.verify(step, from_disk=False)
    except CorruptCheckpointError as error:
        raise CheckpointError(f"the file changed while it was being loaded; start again: {error}") from error
    return made, store.info(step)
