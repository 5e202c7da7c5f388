"""`python -m shifted_clock launch ...` is `tandem launch ...` whose clock is CLOCK_SECONDS ahead."""

import os
import sys
import time

if __name__ == "__main__":  # not in the processes that an agent starts, which import this file again
    true_time, seconds = time.time, float(os.environ["CLOCK_SECONDS"])
    time.time = lambda: true_time() + seconds
    from tandem.cli import main

    sys.exit(main())
