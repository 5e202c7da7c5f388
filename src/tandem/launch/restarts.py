"""What exit codes mean: for the job, and for whether ranks are started again. Standard library only."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import FINISHED, KILLED, MISCONFIGURED, PEER_LOST, STOPPED, is_own, was_killed


def job_code(codes: Sequence[int]) -> int:
    """The code of a whole from those of its parts.

    The first present in: 2, the program's own (1..127, 255), 137/139/134, other 128+n, 200, 143, 0.
    """

    def order(code: int) -> int:
        if code == MISCONFIGURED:
            return 0
        if is_own(code):
            return 1
        if code in (137, 139, 134):
            return 2
        return {PEER_LOST: 4, STOPPED: 5, FINISHED: 6}.get(code, 3)

    return min(codes, key=order, default=FINISHED)


def is_retried(code: int) -> bool:
    """Whether ranks are started again after this code: 128+n of a signal and 200, but not 143."""
    return code == PEER_LOST or was_killed(code)


def shell_code(exitcode: int | None) -> int:
    """multiprocessing's exit code (-9) as a shell's (137)."""
    if exitcode is None:
        return KILLED
    return 128 - exitcode if exitcode < 0 else exitcode


@dataclass
class RestartBudget:
    """What this node has used of it in this launch. An incident is a failure, however many ranks it ends."""

    incidents_allowed: int
    incidents: int = 0
    generations: int = 0

    @property
    def is_spent(self) -> bool:
        return self.incidents > self.incidents_allowed

    def __str__(self) -> str:
        return f"the restart budget (--max-restarts {self.incidents_allowed})"
