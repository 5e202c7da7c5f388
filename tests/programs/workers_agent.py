import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import TandemError
from tandem.launch.fork_server import start_fork_server
from tandem.launch.workers import Workers


@dataclass
class Place:
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    nodes: int = 1
    memories: tuple = ()


if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    workers = Workers("late:rank", None, [])
    try:
        (pid,) = workers.start({0: Place()}).values()
    except TandemError as error:
        sys.exit(f"{error.exit_code}: {error}")
    while not os.path.exists("forked"):
        time.sleep(0.01)
    workers.signal(signal.SIGTERM)
    open("signalled", "w").close()
    print(workers.wait(60), workers.codes())
    workers.kill()
