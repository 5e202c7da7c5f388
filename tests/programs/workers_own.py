import sys
from pathlib import Path

import pool
from agent import Workers, start_as, start_fork_server

if __name__ == "__main__":
    start_fork_server(["tandem.launch.preload"], Path(sys.argv[1]))
    workers = Workers(pool.rank, None, [])
    workers.start({0: start_as()})
    workers.wait(80)
    workers.kill()
