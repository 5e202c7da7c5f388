import sys
import time
from pathlib import Path

import bound
from agent import Workers, start_as, start_fork_server

from tandem.work.base import gpu_index


def warm():
    return {int(path.name[5:]): int(path.read_text()) for path in Path().glob("warm-*")}


if __name__ == "__main__":
    start_fork_server([], Path(sys.argv[1]))
    workers = Workers(bound.rank, None, [], bound.warm_up, gpu_index)
    for number, ranks in ((1, (0, 1)), (2, (3, 2)), (3, (0, 1))):
        ready = warm()
        pids = workers.start(
            {gpu: start_as(rank=rank, local_rank=gpu, nodes=number) for gpu, rank in enumerate(ranks)}
        )
        while not set(pids.values()) <= warm().keys():
            time.sleep(0.01)
        print([warm()[pids[gpu]] for gpu in (0, 1)], len(ready.keys() & set(pids.values())))
        while len(warm()) < 2 * number + 2:
            workers.start_standby(2)
            time.sleep(0.01)
        if number == 3:
            workers.wait(60)
        print(sorted(workers.kill().values()), len(workers._standby))
