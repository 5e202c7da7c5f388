"""How long a rank may say nothing, show no work, or work, until it is called hung."""

from dataclasses import dataclass

from tandem.timeouts import IDLE_HANG_SECONDS, SHORTEST_HANG_SECONDS, STARTING_HANG_SECONDS

STEPS_PER_HANG, LONGEST_PER_HANG = 5, 2


@dataclass(frozen=True)
class Limits:
    """How long what may take in a rank: as --hang-timeout says (None: auto), else by what the run has seen.

    `patience` is --phase-timeout. A stopped process, or one that nobody can hear, is known as such
    within seconds. A thread that neither computes nor runs Python may be at an upload, or wait for a lock
    that nobody opens: only time tells, so it has minutes. One that computes has the time of an evaluation.
    """

    hang_timeout: float | None
    patience: float

    def of_silence(self, typical_step: float | None) -> float:
        """What a rank that says nothing has, and ranks in different collectives; None: it has not trained."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        if typical_step is None:  # imports and compilation may starve the heartbeat thread
            return STARTING_HANG_SECONDS
        return max(SHORTEST_HANG_SECONDS, STEPS_PER_HANG * typical_step)

    def of_idling(self, longest_step: float) -> float:
        """What a rank that trains, and shows no work, has."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        return max(IDLE_HANG_SECONDS, LONGEST_PER_HANG * longest_step)

    def of_work(self, trains: bool) -> float:
        """What a phase has in all, that of a step where the rank `trains`."""
        return self.hang_timeout if trains and self.hang_timeout is not None else self.patience
