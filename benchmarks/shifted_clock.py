"""`python -m shifted_clock launch ...` is `tandem launch ...` with a clock that is CLOCK_SECONDS ahead.

Only the agent's wall clock is shifted, where it is compared with other nodes: libfaketime breaks waits, and
the kernel has only one wall clock.
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
    from tandem.launch import rendezvous_state

    dynamic_rendezvous.datetime = rendezvous_state.datetime = Shifted
    time.time = lambda: true_time() + seconds
    sys.exit(main())
