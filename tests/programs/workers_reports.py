import sys
from pathlib import Path

import hit
from agent import start_as

from tandem.launch.fork_server import start_fork_server
from tandem.launch.workers import Workers

if __name__ == "__main__":
    start_fork_server([sys.argv[2]], Path(sys.argv[1]))
    workers = Workers(hit.rank, None, [])
    workers.start({0: start_as()})
    print(workers.wait(60), workers.codes())
    workers.kill()
