"""How long a rank may be silent, idle or busy before it counts as hung."""

from dataclasses import dataclass

from tandem.timeouts import IDLE_HANG_SECONDS, SHORTEST_HANG_SECONDS, STARTING_HANG_SECONDS

STEPS_PER_HANG = 5
LONGEST_PER_HANG = 2


@dataclass(frozen=True)
class HangLimits:
    """Time limits of a rank: --hang-timeout, or (None: auto) limits derived from the run's steps.

    `patience` is --phase-timeout. A stopped process, or one that cannot be heard, is recognized within
    seconds. A thread that neither computes nor runs Python may be uploading a file or waiting for a lock that
    is never released; only time distinguishes these, so it gets minutes. A thread that computes gets the time
    of an evaluation.
    """

    hang_timeout: float | None
    patience: float

    def of_silence(self, typical_step: float | None) -> float:
        """Return the limit for silence, and for waits in different collectives; None: not trained yet."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        if typical_step is None:  # imports and compilation may starve the heartbeat thread
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * typical_step)

    def of_idling(self, longest_step: float) -> float:
        """Return the limit for a rank that trains but shows no work."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        # Not the typical step: a step that compiled or waited for a volume may recur, and was no hang.
        return max(IDLE_HANG_SECONDS, LONGEST_PER_HANG * longest_step)

    def of_work(self, trains: bool) -> float:
        """Return the limit for a whole phase; that of a step if the rank `trains`."""
        return self.hang_timeout if trains and self.hang_timeout is not None else self.patience
