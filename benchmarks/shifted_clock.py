"""`python -m shifted_clock launch ...` is `tandem launch ...` whose clock is CLOCK_SECONDS ahead.

Only the agent's, where nodes are compared; libfaketime breaks waits, and the kernel has one wall clock.
"""

import datetime
import os
import sys
import time

true, true_time, seconds = datetime.datetime, time.time, float(os.environ["CLOCK_SECONDS"])


class Shifted(true):
    @classmethod
    def now(cls, tz=None):  # type: ignore[no-untyped-def]
        return true.now(tz) + datetime.timedelta(seconds=seconds)


if __name__ == "__main__":  # not in the processes that an agent starts, which import this file again
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    from tandem.cli import main
    from tandem.launch import membership

    dynamic_rendezvous.datetime = membership.datetime = Shifted
    time.time = lambda: true_time() + seconds
    sys.exit(main())
