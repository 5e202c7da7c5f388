import sys
import time
from pathlib import Path

import bound
from agent import Workers, start_as, start_fork_server
from generations import warm

from tandem.work.base import rank_identity

if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers(bound.rank, None, [], bound.warm_up, rank_identity)
    for size in (1, 2, 2):
        ready = warm()
        pids = workers.start({0: start_as(world_size=size)})
        print(len(ready.keys() & set(pids.values())))
        while not warm().keys() - ready.keys() - set(pids.values()):
            workers.start_standby(1)
            time.sleep(0.01)
        workers.kill()
    workers.end_standby()
