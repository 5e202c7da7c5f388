"""TensorBoard event files (extra: tensorboard)."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tandem.errors import ConfigError

logger = logging.getLogger("tandem")


class EventWriter:
    """Writes scalars in `directory`; hides an earlier launch's events at `purge_step` and later.

    Raises ConfigError if TensorBoard is not installed. A failed write is logged once and never raises
    OSError.
    """

    def __init__(self, directory: Path, purge_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tracker tensorboard needs TensorBoard, which cannot be imported ({error}); "
                "run: pip install 'tandem-train[tensorboard]', or omit --tracker tensorboard"
            ) from error
        self._failed = False
        # torch.utils.tensorboard has no annotations
        self._writer: Any = None
        with self._told_once():
            self._writer = SummaryWriter(log_dir=str(directory), purge_step=purge_step)  # type: ignore[no-untyped-call,unused-ignore]

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write `values` (name -> number) at `step`."""
        with self._told_once():
            for name, value in values.items() if self._writer is not None else ():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        with self._told_once():
            if self._writer is not None:
                self._writer.close()

    @contextmanager
    def _told_once(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write TensorBoard events (%s); training continues", error)
            self._failed = True
