import os
import sys
import time
from pathlib import Path

import delayed
import late
from agent import Workers, start_fork_server

if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    Workers(late.rank, None, [], delayed.warm_up).start_standby(1)
    while not os.path.exists("asked"):
        time.sleep(0.01)
    os._exit(7)
