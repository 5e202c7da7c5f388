"""Whether nodes wait to be let in, asked from a thread of its own.

The store of an agent that is stopped does not answer; the agent here looks after its ranks meanwhile.
"""

import threading
from collections.abc import Callable

from tandem.timeouts import MEMBERSHIP_SECONDS


class Membership:
    """Looks at the rendezvous during one generation, from construction to `close`."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask, self._closing = ask, threading.Event()
        self._found = False
        self._error: Exception | None = None
        threading.Thread(target=self._look, name="tandem-membership", daemon=True).start()

    def is_awaited(self) -> bool:
        """Whether nodes waited at the last look; raises what that raised."""
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """No more looks; one that does not end is left to itself."""
        self._closing.set()

    def _look(self) -> None:
        while not self._closing.wait(MEMBERSHIP_SECONDS):
            try:
                self._found = self._ask()
            except Exception as error:  # for the agent, which decides what it means
                self._error = error
                return
