"""Poll from a separate thread whether nodes wait to be let in.

The store of a stopped agent does not answer. The thread blocks then, while the agent here still watches its
ranks.
"""

import threading
from collections.abc import Callable

from tandem.timeouts import MEMBERSHIP_SECONDS


class Membership:
    """Poll the rendezvous during one generation, from construction to `close`."""

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._closing = threading.Event()
        self._found = False
        self._error: Exception | None = None
        threading.Thread(target=self._look, name="tandem-membership", daemon=True).start()

    def is_awaited(self) -> bool:
        """Return whether nodes waited at the last poll; raise what the poll raised."""
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """Stop polling. A poll that is blocked is left alone; its thread is a daemon."""
        self._closing.set()

    def _look(self) -> None:
        while not self._closing.wait(MEMBERSHIP_SECONDS):
            try:
                self._found = self._ask()
            except Exception as error:  # re-raised in the agent's thread, which decides what it means
                self._error = error
                return
