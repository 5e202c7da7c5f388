"""A start that takes its time says what it is at: a line for what keeps it silent, none in a quick start."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.log import last_line_at
from tandem.timeouts import SILENCE_SECONDS, SOON_SECONDS

log = logging.getLogger("tandem.start")


@contextmanager
def still(doing: str) -> Iterator[None]:
    """Say `still DOING` ("importing torch") once, where the block makes a silence of SILENCE_SECONDS.

    It has begun with the last line before. Any other line in the block ends the watch: things go on. No
    thread is left behind it: who forks after it has one.
    """
    before, closing = last_line_at(), threading.Event()

    def watch(seconds: float) -> None:
        if not closing.wait(seconds) and last_line_at() == before:
            log.info("still %s", doing)

    if before is None:
        yield
        return
    left = max(SOON_SECONDS, before + SILENCE_SECONDS - time.monotonic())
    thread = threading.Thread(target=watch, args=(left,), name="tandem-silence", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()
