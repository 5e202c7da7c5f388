"""In a node: how many requests its fetching processes have repeated, which they count in shared memory."""

import os
from contextlib import suppress
from pathlib import Path

from tandem.data.block_fetcher import SharedStatus
from tandem.data.ranges import RETRIED

repeated = 0
for process in Path("/proc").glob("[0-9]*"):
    with suppress(OSError):  # it has just ended
        if (process / "comm").read_text() == "tandem-blocks\n":
            descriptor = (process / "cmdline").read_text().split("\0")[-3]
            repeated += SharedStatus(os.open(process / "fd" / descriptor, os.O_RDWR)).get(RETRIED)
print(repeated)
