import os
import signal
import sys
import time
from pathlib import Path

import late

from tandem.distributed.position import Position, RankStart
from tandem.errors import TandemError
from tandem.launch.fork_server import start_fork_server
from tandem.launch.workers import Workers


def start_as(**position):
    return RankStart(Position(**position))


if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    workers = Workers(late.rank, None, [])
    try:
        (pid,) = workers.start({0: start_as()}).values()
    except TandemError as error:
        sys.exit(f"{error.exit_code}: {error}")
    while not os.path.exists("forked"):
        time.sleep(0.01)
    workers.signal(signal.SIGTERM)
    open("signalled", "w").close()
    print(workers.wait(60), workers.codes())
    workers.kill()
