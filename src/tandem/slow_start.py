"""Log what a slow start is doing: one line when it has been silent, none in a quick start."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.log import last_line_at
from tandem.timeouts import SILENCE_SECONDS, SOON_SECONDS

log = logging.getLogger("tandem.start")

JOIN_SECONDS = 1.0


@contextmanager
def log_if_slow(doing: str, silence: float = SILENCE_SECONDS, soon: float = SOON_SECONDS) -> Iterator[None]:
    """Log `still DOING` ("importing torch") once if nothing is logged for `silence` seconds.

    The silence begins with the last line before the block. A block shorter than `soon` logs nothing. Any
    other line in the block ends the watch. The thread has ended when the block is left, because code after
    it may fork.
    """
    before, closing = last_line_at(), threading.Event()

    def watch(seconds: float) -> None:
        if not closing.wait(seconds) and last_line_at() == before:
            log.info("still %s", doing)

    # This process never writes to a terminal, so no silence is noticed.
    if before is None:
        yield
        return
    left = max(soon, before + silence - time.monotonic())
    thread = threading.Thread(target=watch, args=(left,), name="tandem-silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        # Limited, because a signal handler that raises inside logging leaves its lock locked.
        thread.join(JOIN_SECONDS)
