"""Saves, counted: a failed save never kills training, too many in a row do."""

import logging
from collections.abc import Mapping
from typing import Any

from tandem.checkpoint.retention import Retention
from tandem.checkpoint.state import serialize
from tandem.checkpoint.store import CheckpointStore, SaveResult
from tandem.errors import CheckpointError

log = logging.getLogger("tandem.checkpoint")


class CheckpointWriter:
    """Rank 0's writer: saves, prunes after the newest is verified, and counts failures in a row."""

    def __init__(self, store: CheckpointStore, keep: Retention, failures_allowed: int) -> None:
        self._store, self._keep, self._allowed = store, keep, failures_allowed
        self.failures_in_a_row = 0
        self.failures = 0
        self.last_step: int | None = None

    def save(self, step: int, state: Mapping[str, Any], info: Mapping[str, Any]) -> SaveResult | None:
        """Save `state` as of `step`; None when it failed and training may go on.

        Raises CheckpointError when more saves in a row failed than are allowed.
        """
        payload = serialize(state)
        try:
            result = self._store.save(step, lambda sink: sink.write(payload), dict(info))
        except CheckpointError as error:
            self.failures += 1
            self.failures_in_a_row += 1
            if self.failures_in_a_row > self._allowed:
                raise CheckpointError(
                    f"{self.failures_in_a_row} saves in a row failed, --checkpoint-failures-allowed is "
                    f"{self._allowed}; the last one: {error}"
                ) from error
            log.warning(
                "save at step %d failed (%d in a row, %d allowed): %s",
                step,
                self.failures_in_a_row,
                self._allowed,
                error,
            )
            return None
        self.failures_in_a_row, self.last_step = 0, step
        self._prune()
        return result

    def _prune(self) -> None:
        try:
            self._store.prune(self._keep)
        except CheckpointError as error:
            log.warning("old checkpoints stay: %s", error)
