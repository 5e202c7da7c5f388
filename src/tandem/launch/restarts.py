"""Define what exit codes mean for the job and for restarts.

Standard library only. docs/architecture.md#who-decides-restarts has the reasons; docs/exit-codes.md lists the
codes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import FINISHED, KILLED, MISCONFIGURED, PEER_LOST, STOPPED, is_own, was_killed


def job_code(codes: Sequence[int]) -> int:
    """Return the exit code of a whole from those of its parts.

    It is the first code present in this order: 2, the script's own (1..127, 255), 137/139/134, other 128+n,
    200, 143, 0.
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
    """Return whether ranks are restarted after this code: 128+n of a signal, and 200, but not 143."""
    return code == PEER_LOST or was_killed(code)


def shell_code(exitcode: int | None) -> int:
    """Convert multiprocessing's exit code (-9) to a shell's (137)."""
    if exitcode is None:
        return KILLED
    return 128 - exitcode if exitcode < 0 else exitcode


@dataclass
class RestartBudget:
    """The restart budget that this node has used in this launch.

    A failure counts once, however many ranks it ends.
    """

    incidents_allowed: int
    incidents: int = 0
    generations: int = 0

    @property
    def is_spent(self) -> bool:
        return self.incidents > self.incidents_allowed

    def __str__(self) -> str:
        return f"the restart budget (--max-restarts {self.incidents_allowed})"
